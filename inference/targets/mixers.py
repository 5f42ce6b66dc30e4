"""Recurrent layers of hybrid targets: their own weights, run over draft trees and ragged texts.

A mixer projects hidden states, convolves them over a few positions, runs a recurrence and projects
the result. The middle is `rounds.recurrent`; here are the families' projections, which read the
weights of a module of transformers by their names. Whether they compute what the module does is
tried when a target is loaded (`CausalModel.check_tree`).

Shapes: B rows, N positions of one forward pass, H hidden size, C channels of a convolution, W its
width; G, R, K, V and D are those of `rounds.recurrent`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..rounds.recurrent import RecurrentState, RecurrentStates, Terms
from ..rounds.tree import Pass

PASSES: dict[int | None, tuple[RecurrentStates, Pass]] = {}
"""States and places of the pass that each thread runs; None: of compiled code, without threads."""


class Mixer(ABC):
    """A recurrent module, and how its weights are used."""

    needs: tuple[str, ...]
    """Names by which a module of this kind is recognised."""
    delta = False
    """True if values are corrected by the delta rule."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def convolution(self) -> Any:
        """Module of the convolution."""
        return self.module.conv1d

    @abstractmethod
    def project(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return inputs `[B, N, C]` of the convolution for hidden states `[B, N, H]`, and more."""

    def activate(self, mixed: Tensor) -> Tensor:
        """Return what follows from a convolution `[B, N, C]`."""
        return functional.silu(mixed)

    def terms(self, mixed: Tensor, rest: Any, places: Pass) -> Terms | None:
        """Return the recurrence's terms of a convolution `[B, N, C]`; None without one."""
        return None

    @abstractmethod
    def finish(self, read: Tensor, terms: Terms | None, rest: Any) -> Tensor:
        """Return the module's output `[B, N, H]` of what was read, `[B, N, G * R, V]`.

        Without a recurrence `read` is the convolution `[B, N, C]`.
        """

    def run(self, x: Tensor, state: RecurrentState, places: Pass) -> Tensor:
        """Return the module's output for hidden states `[B, N, H]`."""
        inputs, rest = self.project(x)
        weight, bias = self.convolution.weight.squeeze(1).T, self.convolution.bias
        mixed = self.activate(state.convolve(inputs, weight, places, bias))
        terms = self.terms(mixed, rest, places)
        if terms is None:
            return self.finish(mixed, None, rest)
        # Training may compute in bfloat16, in which differences of sums of decays lose their bits.
        with torch.autocast(x.device.type, enabled=False):
            read = state.recur(terms, self.delta, places)
        return self.finish(read.flatten(1, 2).transpose(1, 2), terms, rest)


class GatedDeltaNet(Mixer):
    """Gated delta rule (arXiv 2412.06464), as in Qwen3.5: a matrix for queries, keys and values."""

    needs = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias", "conv1d")
    delta = True

    def project(self, x: Tensor) -> tuple[Tensor, Any]:
        module = self.module
        rest = module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x)
        return module.in_proj_qkv(x), rest

    def terms(self, mixed: Tensor, rest: Any, places: Pass) -> Terms:
        module = self.module
        _, strength, decay = rest
        sizes = module.key_dim, module.key_dim, module.value_dim
        queries, keys, values = mixed.split(sizes, -1)
        groups = module.num_k_heads
        queries, keys = (_unit(_headed(x, groups, groups)) for x in (queries, keys))
        values = _headed(values, module.num_v_heads, groups)
        decay = -module.A_log.float().exp() * functional.softplus(decay.float() + module.dt_bias)
        return Terms(
            queries * module.head_k_dim**-0.5,
            keys,
            values,
            _headed(decay, module.num_v_heads, groups),
            _headed(self.strength(strength), module.num_v_heads, groups)[..., 0],
        )

    def strength(self, projected: Tensor) -> Tensor:
        """Return the strength of the delta rule."""
        return projected.sigmoid()

    def finish(self, read: Tensor, terms: Terms | None, rest: Any) -> Tensor:
        gate = rest[0]
        norm, project = self.output_parts()
        flat = read.to(gate.dtype).reshape(-1, read.shape[-1])
        normed = norm(flat, gate.reshape(-1, read.shape[-1]))
        return project(normed.reshape(*read.shape[:2], -1))

    def output_parts(self) -> tuple[Any, Any]:
        """Return the module's norm and its last projection."""
        return self.module.norm, self.module.out_proj


class InterleavedGatedDeltaNet(GatedDeltaNet):
    """The same as in Qwen3-Next: two matrices whose rows are ordered by key heads."""

    needs = ("in_proj_qkvz", "in_proj_ba", "A_log", "dt_bias", "conv1d")

    def project(self, x: Tensor) -> tuple[Tensor, Any]:
        module = self.module
        groups = module.num_k_heads
        values = module.value_dim // groups
        joint = module.in_proj_qkvz(x).unflatten(-1, (groups, -1))
        parts = joint.split([module.head_k_dim, module.head_k_dim, values, values], -1)
        queries, keys, inner, gate = (part.flatten(-2) for part in parts)
        strength, decay = module.in_proj_ba(x).unflatten(-1, (groups, -1)).chunk(2, -1)
        rest = gate, strength.flatten(-2), decay.flatten(-2)
        return torch.cat([queries, keys, inner], -1), rest


class SeparateGatedDeltaNet(GatedDeltaNet):
    """The same as in OLMo hybrid: a matrix for each part, and a strength of up to 2."""

    needs = (
        "q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_norm", "A_log", "conv1d"
    )  # fmt: skip

    def project(self, x: Tensor) -> tuple[Tensor, Any]:
        module = self.module
        inputs = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
        return inputs, (module.g_proj(x), module.b_proj(x), module.a_proj(x))

    def strength(self, projected: Tensor) -> Tensor:
        strength = projected.sigmoid()
        return 2 * strength if self.module.allow_neg_eigval else strength

    def output_parts(self) -> tuple[Any, Any]:
        return self.module.o_norm, self.module.o_proj


class KimiDeltaAttention(Mixer):
    """Kimi's delta attention (arXiv 2510.26692): each channel of a key has a decay of its own."""

    needs = ("q_proj", "k_proj", "v_proj", "forget_gate", "b_proj", "g_a_proj", "o_norm", "conv1d")
    delta = True

    def project(self, x: Tensor) -> tuple[Tensor, Any]:
        module = self.module
        inputs = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
        return inputs, x

    def terms(self, mixed: Tensor, rest: Any, places: Pass) -> Terms:
        module, heads = self.module, self.module.num_heads
        queries, keys, values = (_headed(x, heads, heads) for x in mixed.chunk(3, -1))
        return Terms(
            _unit(queries) * module.head_dim**-0.5,
            _unit(keys),
            values,
            _headed(module.forget_gate(rest).flatten(2), heads, heads),
            _headed(module.b_proj(rest).sigmoid(), heads, heads)[..., 0],
        )

    def finish(self, read: Tensor, terms: Terms | None, rest: Any) -> Tensor:
        module = self.module
        gate = module.g_b_proj(module.g_a_proj(rest)).view(read.shape)
        normed = module.o_norm(read.to(rest.dtype), gate)
        return module.o_proj(normed.reshape(*read.shape[:2], -1))


class Mamba2(Mixer):
    """State space of Mamba-2 (arXiv 2405.21060): Bamba, Granite, Nemotron-H, Falcon-H1, Zamba2."""

    needs = ("in_proj", "A_log", "dt_bias", "D", "conv1d", "n_groups", "ssm_state_size")

    def project(self, x: Tensor) -> tuple[Tensor, Any]:
        module = self.module
        scale = getattr(module, "ssm_in_multiplier", None)  # Falcon-H1's factors
        projected = module.in_proj(x if scale is None else x * scale)
        if scale is not None:
            projected = projected * module.mup_vector
        sizes = module.intermediate_size, module.conv_dim, module.num_heads
        gate, inputs, steps = projected.split(sizes, -1)
        return inputs, (gate, steps)

    def activate(self, mixed: Tensor) -> Tensor:
        return self.module.act(mixed)

    def terms(self, mixed: Tensor, rest: Any, places: Pass) -> Terms:
        module = self.module
        groups, heads = module.n_groups, module.num_heads
        states = groups * module.ssm_state_size
        values, keys, queries = mixed.split([module.intermediate_size, states, states], -1)
        steps = functional.softplus(rest[1].float() + module.dt_bias)
        if places.counts is not None:
            # `generate` writes by passes over one token, in which transformers does not limit
            # steps.
            limited = steps.clamp(*module.time_step_limit)
            written = places.written
            steps = limited if written is None else steps.where(written[..., None], limited)
        decays = -steps * module.A_log.float().exp()
        return Terms(
            _headed(queries, groups, groups),
            _headed(keys, groups, groups),
            _headed(values, heads, groups),
            _headed(decays, heads, groups),
            _headed(steps, heads, groups)[..., 0],
        )

    def finish(self, read: Tensor, terms: Terms | None, rest: Any) -> Tensor:
        assert terms is not None
        module, gate = self.module, rest[0]
        values = terms.values.flatten(1, 2).transpose(1, 2)
        read = (read + module.D.float()[:, None] * values).flatten(2).to(gate.dtype)
        if getattr(module, "mamba_rms_norm", True):
            read = module.norm(read, gate)
        else:
            read = read * functional.silu(gate)
        return module.out_proj(read.to(gate.dtype))


class ShortConvolution(Mixer):
    """Gated convolution of LFM2, which has no matrix."""

    needs = ("conv", "in_proj", "out_proj", "conv_kernel_size")

    @property
    def convolution(self) -> Any:
        return self.module.conv

    def project(self, x: Tensor) -> tuple[Tensor, Any]:
        before, after, inner = self.module.in_proj(x).chunk(3, -1)
        return before * inner, after

    def activate(self, mixed: Tensor) -> Tensor:
        return mixed

    def finish(self, read: Tensor, terms: Terms | None, rest: Any) -> Tensor:
        return self.module.out_proj(rest * read)


KINDS: tuple[type[Mixer], ...] = (
    GatedDeltaNet,
    InterleavedGatedDeltaNet,
    SeparateGatedDeltaNet,
    KimiDeltaAttention,
    Mamba2,
    ShortConvolution,
)


def mixers_of(decoder: nn.Module) -> list[Mixer]:
    """Return the recurrent mixers of a decoder that are known here."""
    found = []
    for module in decoder.modules():
        for kind in KINDS:
            if all(hasattr(module, name) for name in kind.needs):
                found.append(kind(module))
                break
    return found


def unknown_mixers(decoder: nn.Module, known: list[Mixer]) -> str:
    """Return why recurrent modules of a decoder cannot be run here; empty: there are none such."""
    parts = {part for mixer in known for part in mixer.module.modules()}
    for module in decoder.modules():
        # Every state space and delta rule has its decay under this name.
        if module in parts or "A_log" not in dict(module.named_parameters(recurse=False)):
            continue
        name = type(module).__name__
        if hasattr(module, "x_proj") or hasattr(module, "dt_proj"):
            return (
                f"{name} is a layer of Mamba-1, which transformers starts from nothing in a pass "
                "over several tokens"
            )
        return f"{name} is a recurrent layer of a form not known here"
    return ""


def limit_steps(mixers: list[Mixer]) -> bool:
    """Return true if recurrent layers limit their steps, which they do in prompts alone."""
    limits = [getattr(mixer.module, "time_step_limit", (0.0, math.inf)) for mixer in mixers]
    return any(least > 0 or most < math.inf for least, most in limits)


def install(mixers: list[Mixer]) -> None:
    """Let the mixers' modules run by `Mixer.run` within `over`, and by their own functions else."""
    for mixer in mixers:
        own = mixer.module.forward
        if not (isinstance(own, partial) and own.func is _run):
            mixer.module.forward = partial(_run, mixer, own)


@contextmanager
def over(states: RecurrentStates, places: Pass) -> Iterator[None]:
    """Let this thread's pass run over `states`; `places` is a `complete` one."""
    thread = _thread()
    PASSES[thread] = states, places
    try:
        yield
    finally:
        del PASSES[thread]


def _thread() -> int | None:
    return None if torch.compiler.is_compiling() else get_ident()


def _run(
    mixer: Mixer, own: Callable[..., Any], hidden_states: Tensor, *arguments: Any, **named: Any
) -> Any:
    if (running := PASSES.get(_thread())) is None:
        return own(hidden_states, *arguments, **named)
    states, places = running
    return mixer.run(hidden_states, states.of(mixer.module.layer_idx), places)


def _headed(x: Tensor, heads: int, groups: int) -> Tensor:
    """Return `[B, G, R, N, ..]` of `[B, N, heads * ..]`, in float32; head h has key head h // R."""
    x = x.float().unflatten(-1, (groups, heads // groups, -1))
    return x.permute(0, 2, 3, 1, 4)


def _unit(x: Tensor) -> Tensor:
    """Return vectors `[.., E]` of length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
