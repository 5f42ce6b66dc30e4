"""A round as one function over tensors that never move, recorded as a CUDA graph.

A round verifies a tree, commits what was accepted, and drafts the next tree. What goes from one
round to the next has a place of its own: the tree, the choices (`Draws`), and the caches of target
and drafter (`StaticTreeCache`). So the kernels of one round can be recorded, and launched again
without Python in every later round of the same form, of this batch or of another one.

Nothing here chooses a token: a recording runs the operators of a round, in their order. On a CPU
rounds are compiled, as two functions, so that no drafts are made after the end of a reply.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..heads.errors import first_line
from .base.settings import Sampling
from .proposers.contract import Proposer, StaticProposer
from .rounds.accept import judge
from .rounds.cache import Pool, StaticTreeCache, TreeCache
from .rounds.outcome import Accepted, DeviceOutcome, Hidden
from .rounds.sampling import Draws
from .rounds.tree import DraftTree, Pass

if TYPE_CHECKING:
    from .targets.causal_model import CausalModel

log = logging.getLogger(__name__)
WARM_UP = 2
"""Rounds that run as they are before one is recorded: they fill tables and make workspaces."""
_FUNCTIONS: WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]] = WeakKeyDictionary()
"""Compiled functions of each owner, by the function and its constants."""
_NUMBERS = itertools.count()


def run_nodes(
    target: CausalModel, tree: DraftTree, cache: TreeCache, taps: tuple[int, ...]
) -> tuple[Hidden, Tensor]:
    """Return the features of the nodes of `tree`, and the target's logits `[B, N, V]`."""
    nodes = Pass(depths=tree.tables.depths, visible=tree.tables.ancestors)
    hidden = target.forward(tree.tokens, nodes, cache, taps)
    return hidden, target.head(hidden.last)


def verify(
    target: CausalModel, tree: DraftTree, cache: TreeCache, draws: Draws, taps: tuple[int, ...]
) -> tuple[Accepted, DeviceOutcome]:
    """Verify `tree`, keep its accepted path in `cache`, and return it, without a transfer.

    The path is as wide as the tree is deep. The texts of `draws` need space for as many tokens.
    """
    hidden, logits = run_nodes(target, tree, cache, taps)
    packed = DeviceOutcome.of(tree, judge(tree, logits, draws))
    accepted = Accepted.of(tree, packed, hidden)
    cache.commit(accepted.gained, None if accepted.in_place else accepted.path)
    draws.extend(accepted.ids, cache.progress(accepted.counts))
    return accepted, packed


def traced(proposer: Proposer) -> StaticProposer | None:
    """Return the proposer if it is a part of static rounds; None for one that needs the host."""
    return proposer if isinstance(proposer, StaticProposer) and proposer.traceable else None


class CudaRecorder:
    """A CUDA graph of a function's kernels."""

    def __init__(self) -> None:
        self._graph, self._stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Return `function()`, run on the stream on which it will be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = function()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], Any]) -> Any:
        """Record `function`, run it once, and return its result, which `replay` overwrites."""
        with torch.cuda.graph(
            self._graph, pool=_pool(), stream=self._stream, capture_error_mode="thread_local"
        ):
            result = function()
        self._graph.replay()  # recording runs nothing
        return result

    def replay(self) -> None:
        """Launch all kernels again."""
        self._graph.replay()


@lru_cache(maxsize=1)
def _pool() -> Any:
    """Return the memory of all graphs.

    They can share it: a graph's results are read before the next one is launched, and whatever
    lasts for longer was made outside of all of them.
    """
    return torch.cuda.graph_pool_handle()


def recorder_for(device: torch.device) -> Any:
    """Return the class of recorders for a device; None where rounds are compiled."""
    return CudaRecorder if device.type == "cuda" else None


class ExternalTensors(TorchDispatchMode):
    """Keeps the tensors that a function reads and has not made.

    A graph reads them at their addresses, whoever else drops them: tables are cached by
    `lru_cache`, and a cache that is full forgets the oldest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self.kept: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for tensor in inputs:
            if (storage := tensor.untyped_storage()._cdata) not in self._made:
                self.kept[storage] = tensor
        result = func(*args, **kwargs)
        given = {x.untyped_storage()._cdata for x in inputs}
        made = {x.untyped_storage()._cdata for x in tree_leaves(result) if isinstance(x, Tensor)}
        self._made |= made - given
        return result


StaticRound = tuple[Accepted, DeviceOutcome, DraftTree | None]
"""Accepted path, outcome on the device, and the next drafts if the proposer is part of the round.

Otherwise the path has not been committed to the proposer either, which needs the host for that.
"""


class RecordedRound:
    """Rounds over trees of one form, recorded the third time that there is one."""

    def __init__(
        self,
        recorder: Any,
        tree: DraftTree,
        proposer: Proposer,
        cache: StaticTreeCache,
        draws: Draws,
    ) -> None:
        """Make places for the tree and for the state of the proposer."""
        self._recorder, self._cache, self._draws = recorder, cache, draws
        self._place = tree.clone()
        names = part.left_for_commit if (part := traced(proposer)) else ()
        self._state = {name: getattr(proposer, name).clone() for name in names}
        self._calls = 0
        self._result: tuple[Accepted, DeviceOutcome] | None = None
        self.outside = ExternalTensors()

    def __call__(self, target: CausalModel, proposer: Proposer, tree: DraftTree) -> StaticRound:
        """Verify `tree`, commit, and draft again. What was returned before is overwritten then."""
        if tree is not self._place:
            self._place.copy_(tree)
            self._keep_state(proposer)

        def body() -> tuple[Accepted, DeviceOutcome]:
            # Of the round before: noise is a function of keys and positions, and is made again.
            self._draws.forget_noise()
            found = verify(target, self._place, self._cache, self._draws, proposer.taps)
            if traced(proposer):
                accepted = found[0]
                assert accepted.bonus is not None
                proposer.commit(accepted)
                self._place.copy_(proposer.propose(accepted.bonus, self._draws))
                self._keep_state(proposer)
            return found

        if self._result is not None:
            self._recorder.replay()
        elif self._calls == WARM_UP:
            self._record(body, proposer)
        accepted, packed = self._result or self._recorder.warm_up(body)
        self._calls += 1
        # The roots have moved on, which no code of Python has noticed.
        self._draws.forget_noise()
        return accepted, packed, self._place if traced(proposer) else None

    def _record(
        self, body: Callable[[], tuple[Accepted, DeviceOutcome]], proposer: Proposer
    ) -> None:
        """Record and run a round. Where that is not possible, rounds go on as they are.

        A model that asks the host for a number cannot be recorded, and CUDA says so. Its operators
        have run twice before: what fails is the recording, in whatever library.
        """
        try:
            with self.outside:
                self._result = self._recorder.record(body)
        except Exception as error:  # noqa: BLE001
            log.warning("rounds are not recorded as a CUDA graph: %s", first_line(error))
            # The recording has stopped somewhere, and none of its kernels has run.
            for used in (self._cache, part.own_cache if (part := traced(proposer)) else None):
                if used is not None:
                    used.drop()
            for name, place in self._state.items():
                setattr(proposer, name, place)

    def _keep_state(self, proposer: Proposer) -> None:
        """Move what a proposer has left for its next `commit` to where that is read."""
        for name, place in self._state.items():
            place.copy_(getattr(proposer, name))
            setattr(proposer, name, place)


class StaticRounds:
    """Rounds over one static cache, of one batch after another, and what has its place with it."""

    def __init__(self, cache: StaticTreeCache) -> None:
        self.cache = cache
        self.recorded: WeakKeyDictionary[Any, dict[Any, RecordedRound]] = WeakKeyDictionary()
        """By owner (`StaticProposer.owner_of_rounds`), as long as there is one, and form."""
        self.draws: dict[Sampling, Draws] = {}
        """Choices at their places."""

    def place(self, draws: Draws) -> Draws:
        """Return the choices of a new batch over tensors that stay where they are."""
        if draws.sampling not in self.draws:
            self.draws[draws.sampling] = draws.placed(self.cache.capacity)
        placed = self.draws[draws.sampling]
        placed.take(draws)
        return placed

    def run(
        self, target: CausalModel, proposer: Proposer, tree: DraftTree, draws: Draws
    ) -> StaticRound:
        """Run a round, from a recording, or compiled and without the next drafts.

        `draws` are those of `place`.
        """
        recorder = recorder_for(self.cache.device)
        if recorder is None:
            if tree.shape is not None:
                _ = tree.tables  # they are kept for a shape, and need not be made in the function
            function = compiled(verify, target, proposer.taps)
            return *function(target, tree, self.cache, draws, proposer.taps), None
        # A round that the proposer has no part in is the same for all proposers.
        part = traced(proposer)
        rounds = self.recorded.setdefault(part.owner_of_rounds(target) if part else target, {})
        key = (proposer.taps, *tree.form, draws.sampling, part and part.round_key)
        if key not in rounds:
            rounds[key] = RecordedRound(recorder(), tree, proposer, self.cache, draws)
        return rounds[key](target, proposer, tree)


POOLS: WeakKeyDictionary[CausalModel, Pool[StaticRounds]] = WeakKeyDictionary()
"""Static rounds of each target that no batch uses now."""


def take_rounds(target: CausalModel, batch: int, capacity: int) -> StaticRounds:
    """Return static rounds for another batch, which belong into the pool when it has ended."""
    found = POOLS.setdefault(target, Pool()).pop((batch, capacity), None)
    if found is None:
        layers = target.layers_with_keys
        return StaticRounds(StaticTreeCache(batch, capacity, target.device, layers))
    found.cache.reset()
    return found


def propose(target: CausalModel, proposer: Proposer, root: Tensor, draws: Draws) -> DraftTree:
    """Return drafts outside of a recorded round, compiled where rounds are."""
    part = traced(proposer)
    own = part is not None and part.owner_of_rounds(target) is part
    if own and recorder_for(root.device) is None:
        return compiled(type(proposer).propose, proposer)(proposer, root, draws)
    return proposer.propose(root, draws)


def compiled(function: Any, owner: Any, *constants: Any) -> Callable[..., Any]:
    """Return `function`, a function of tensors and of objects that hold them, compiled.

    `owner` is one of its arguments: the proposer, or the target. Its modules and those of the other
    arguments must not change any more. There is a function for each of the `constants`. A batch of
    another size than the first is compiled once more, and then for all sizes (one row is a class of
    its own); a tree of another shape or other sampling settings are compiled by themselves.
    """
    functions = _FUNCTIONS.setdefault(owner, {})
    key = (function, *constants)
    if key not in functions:
        # torch keeps compilations with the object of the code, at most eight, and looks through all
        # of them in every call. A number that differs between two calls of a name becomes a
        # variable. So each owner has code and a name of its own.
        name = f"{function.__name__}_{next(_NUMBERS)}"
        code = function.__code__.replace(co_name=name)
        own = FunctionType(
            code, function.__globals__, name, function.__defaults__, function.__closure__
        )
        functions[key] = compile_function(own)
    return functions[key]


def compile_function(function: Any) -> Callable[..., Any]:
    return torch.compile(function, options={"guard_filter_fn": may_change})


def may_change(guards: Sequence[Any]) -> list[bool]:
    """Return which of a compiler's conditions have to be checked in every call.

    Most of them are about modules and about what a file has imported, which stay as they are. On
    the quickstart target 120 of 883 are left, and checking them takes 0.1 instead of 0.3 ms.
    """
    return [
        not (guard.is_global or guard.orig_guard.source.is_unspecialized_nn_module())
        for guard in guards
    ]
