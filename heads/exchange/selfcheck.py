"""Self-check of an export: it is read back from its files alone and compared with the drafter.

Engines load a wrong export without a message. Where `fc.weight` or a norm is missing, two of them
raise nothing, and the drafter loses most of its acceptance; the text stays correct, so nobody
notices. An export is therefore checked before it is renamed to the place where a user finds it.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifact import Artifact
from ..draft_model import DraftModel
from ..embedding_and_head import EmbeddingAndHead
from ..errors import UserError
from ..fingerprint import Fingerprint
from ..layout import place, stored_as
from .engines import ENGINES
from .engines.engine import FileLayout
from .foreign import Answers, TargetParts
from .public import read_public

LENGTH = 12  # positions of the forward pass that is compared


def check_name(out: str, kind: str) -> None:
    """Raise `UserError` if an engine would take the folder's name for another method's."""
    for engine in ENGINES.values():
        if (guess := engine.guess(out, kind)) is not None:
            raise UserError(
                f"a folder called {Path(out).name} would be taken for method {guess!r} by "
                f"{engine.title} where none is given; call it {kind.replace('_', '-')}-something"
            )


def check_export(
    folder: Path,
    artifact: Artifact,
    layout: FileLayout,
    dtype: torch.dtype,
    head: Tensor | None = None,
) -> None:
    """Read `folder` back and raise `UserError` unless it holds the drafter of `artifact`.

    `layout` and `dtype` are those of the files. `head` `[V, H]` is the target's output matrix,
    which one layout stores; the artifact of an EAGLE-3 has its own rows of it by now.
    """
    if isinstance(artifact.drafter, DraftModel):
        # transformers writes its config, with nulls that its readers understand.
        stand_in = stand_in_for(artifact.fingerprint).embedding_and_head
        target = replace(stand_in, tokenizer=artifact.drafter.tokenizer)
        loaded: Any = DraftModel.load(folder, dtype, target)
    else:
        loaded = load_back(folder, artifact, layout, head)
    _check_equal(loaded, artifact.drafter, dtype)


def load_back(folder: Path, artifact: Artifact, layout: FileLayout, head: Tensor | None) -> Any:
    """Return the drafter that is built from the files in `folder` alone.

    Raises `UserError` if they are recognised as another layout, leave anything open, or give other
    sizes or flags than the drafter of `artifact` has.
    """
    target = replace(stand_in_for(artifact.fingerprint), head=head)
    loaded = read_public(folder, target, Answers(ours=True))
    kind = artifact.drafter.kind
    # The reader's name of the layout begins with this; native layouts are called after the kind.
    family = layout.read_as or kind
    if not loaded.layout.startswith(family) or loaded.drafter.kind != kind:
        _fail(f"it is taken for {loaded.layout}, not for {family}")
    if loaded.notes:
        _fail(loaded.notes[0])
    loaded_facts, facts = loaded.drafter.facts(), artifact.drafter.facts()
    if loaded_facts != facts:
        # There is one: both have the same keys, being of one class.
        name = next(name for name in facts if loaded_facts[name] != facts[name])
        _fail(f"{name} is {facts[name]} in the drafter and reads as {loaded_facts[name]}")
    return loaded.drafter


def stand_in_for(target: Fingerprint) -> TargetParts:
    """Return a target's sizes with a stand-in for its embedding and its head.

    They replace a target that is not loaded: any functions show if two drafters compute the same.
    The embedding gives each id another row, and the head is the identity, so that every element of
    a drafter's state is compared.
    """
    hidden_size = target.hidden_size

    def stand_in(ids: Tensor) -> Tensor:
        # A sine of token times number: bounded, different for each pair, and made without a table.
        return torch.sin(ids[..., None] * torch.arange(1, hidden_size + 1) * 0.37)

    return TargetParts(
        target.num_layers,
        hidden_size,
        target.vocab_size,
        EmbeddingAndHead(
            stand_in, lambda last: last, target.vocab_size, part=lambda ids: lambda last: last
        ),
    )


@torch.no_grad()
def _check_equal(loaded: Any, live: Any, dtype: torch.dtype) -> None:
    """Raise `UserError` unless both have equal tensors, bit for bit, and compute equal logits.

    `loaded` was read back; `live` is the drafter before it was cast to `dtype`. Two drafters of one
    class with equal facts and tensors compute the same; a draft model's facts are transformers'
    config, so the logits of one forward pass in float32 are compared.
    """
    live_state, loaded_state = live.state_dict(), loaded.state_dict()
    if live_state.keys() != loaded_state.keys():
        _fail(f"{sorted(live_state.keys() ^ loaded_state.keys())[0]} is missing or surplus")
    for name, tensor in live_state.items():
        if tensor.cpu().to(stored_as(tensor, dtype)).ne(loaded_state[name]).any():
            _fail(f"{name} reads back as other numbers")
    if isinstance(live, DraftModel):
        as_stored = copy.deepcopy(live)
        place(as_stored, torch.device("cpu"), dtype)
        for module in (as_stored, loaded):
            place(module, torch.device("cpu"), torch.float32)
        if not torch.equal(outputs(as_stored), outputs(loaded)):
            _fail("the drafter and what reads back compute different logits")


def outputs(drafter: DraftModel) -> Tensor:
    """Return a draft model's logits of `LENGTH` random inputs, the same in every call."""
    # A generator of its own leaves the caller's random state as it is.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, drafter.vocab_size, (1, LENGTH), generator=generator)
    # A cut may have recurrent layers alone, and a cache of transformers takes no such model.
    return drafter.model(ids, use_cache=False).logits


def _fail(reason: str) -> None:
    raise UserError(
        f"the export does not read back as the drafter, so nothing was written: {reason}; please "
        "report this"
    )
