"""Making a small model from a target: some of its layers, narrower, with fewer tokens; or any other
model of its tokenizer.

Shapes: L target layers, H target width, h student width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..heads.draft_model import DraftModel
from ..heads.errors import UserError, first_line
from ..heads.pretrained import make_causal_lm, read_config
from ..inference.spread import decoder_layers
from ..inference.target import Target
from ..inference.target_files import check_there
from .divergences import divergence, log_probs

Choice = Literal["even", "ends", "importance"]
FACTORS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)
"""By which a student's logits may be scaled at the start."""
CALIBRATION_TEXTS, CALIBRATION_LENGTH = 8, 128


@dataclass
class StudentConfig:
    """Where the student comes from: `path`, `config`, or, if neither is given, the target
    itself."""

    path: str | None = None
    """A model folder with the target's tokenizer."""
    config: str | None = None
    """A folder with a config.json, or the file itself: a student from scratch; its vocabulary is
    set to the target's."""
    layers: int | list[int] | None = None
    """Cut from the target: so many of its layers, or just these (from 0); an eighth of them if not
    given."""
    choose: Choice = "even"
    """How so many are chosen: evenly spread, half from each end, or by importance (1 - cosine
    between a layer's input and output, on training text)."""
    hidden_size: int | None = None
    """Cut: width of the residual stream, the dimensions of largest activation; the target's if not
    given."""
    intermediate_size: int | None = None
    """Cut: width of the MLPs, the rows of largest weights; in proportion to hidden_size if not
    given."""
    head: Literal["copy", "tie"] = "copy"
    """Cut: copy embedding and output matrix as the target has them, or tie them to the target's
    output matrix."""
    vocab_size: int | None = None
    """Cut: keep the first so many tokens; the others can then never be drafted, and engines that
    want equal vocabularies refuse the student. Trimming padding rows past the tokenizer's last
    token loses nothing."""

    def __post_init__(self) -> None:
        default = {name: field.default for name, field in self.__dataclass_fields__.items()}
        cuts = [
            name
            for name in default
            if name not in ("path", "config") and getattr(self, name) != default[name]
        ]
        given = [name for name in ("path", "config") if getattr(self, name) is not None]
        if len(given) > 1 or (given and cuts):
            raise UserError(
                f"student.{(given + cuts)[0]} and student.{(given + cuts)[1]} exclude each other; "
                "give one"
            )
        if isinstance(self.layers, list) and self.choose != "even":
            raise UserError(
                f"student.layers names them, so student.choose {self.choose} means nothing; leave "
                "it out"
            )
        for name in ("hidden_size", "intermediate_size", "vocab_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"student.{name} must be at least 1, not {value}")

    @property
    def narrow(self) -> bool:
        """Whether a cut is to be narrower than the target too."""
        return self.hidden_size is not None or self.intermediate_size is not None


@dataclass(frozen=True)
class CutPlan:
    """What a student costs beside its target."""

    parameters: int
    target_parameters: int
    cost: float
    """Weights that a token's forward reads, as a share of the target's: what a draft costs in
    target passes while both wait for memory. An embedding table is not read, one row of it is."""

    def lines(self, dtype: torch.dtype) -> list[str]:
        size = self.parameters * dtype.itemsize
        return [
            f"student: {self.parameters / 1e6:.2f}M parameters, {size / 1e6:.1f} MB in "
            f"{str(dtype).removeprefix('torch.')}, "
            f"{self.parameters / self.target_parameters:.1%} of the target's "
            f"{self.target_parameters / 1e6:.2f}M",
            f"a draft reads {self.cost:.1%} of what a target pass reads; it pays if more drafts "
            "than that are accepted",
        ]


def plan_of(student: nn.Module, target: nn.Module) -> CutPlan:
    def count(model):
        return sum(p.numel() for p in model.parameters())

    return CutPlan(count(student), count(target), _read(student) / _read(target))


def _read(model: Any) -> int:
    """Weights that a forward reads: all but an embedding table that is not the output matrix as
    well."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return sum(p.numel() for p in model.parameters()) - (
        embedding.numel() if embedding is not output else 0
    )


def make_student(
    config: StudentConfig, target: Target, texts: Callable[[], Sequence[Tensor]]
) -> DraftModel:
    """The student that `config` asks for, in float32 on the target's device. `texts`: token ids
    `[S]` to judge importance by.

    Random weights come from torch's global generator. Raises `UserError`.
    """
    if config.path is not None:
        check_there(config.path)
        student = DraftModel.load(Path(config.path), torch.float32, target.embedding_and_head)
    elif config.config is not None:
        student = DraftModel(
            _from_scratch(config.config, target), target.tokenizer, target.vocab_size
        )
    else:
        student = DraftModel(_cut(config, target, texts), target.tokenizer, target.vocab_size)
    model = student.model.to(target.device)
    # engines take the ends of a text from it
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return student.requires_grad_(True)


def _from_scratch(path: str, target: Target) -> nn.Module:
    try:
        config = read_config(path)
        config.vocab_size = target.vocab_size
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(target.config, name, None))
        return make_causal_lm(config, dtype=torch.float32)
    # each architecture demands other things of its config, each in its own way
    except Exception as error:
        raise UserError(f"cannot make a student from {path}: {first_line(error)}") from error


def chosen_layers(
    config: StudentConfig, total: int, importance: Callable[[], list[float]]
) -> list[int]:
    """The target's layers that a student keeps, ascending. Raises `UserError`."""
    if isinstance(config.layers, list):
        if (
            sorted(set(config.layers)) != config.layers
            or not config.layers
            or not all(0 <= i < total for i in config.layers)
        ):
            raise UserError(
                f"student.layers {config.layers} must be ascending, distinct and between 0 and "
                f"{total - 1}"
            )
        return config.layers
    count = config.layers if config.layers is not None else max(total // 8, 1)
    if not 1 <= count <= total:
        raise UserError(f"student.layers must be between 1 and the target's {total}, not {count}")
    if config.choose == "importance":
        values = importance()
        return sorted(sorted(range(total), key=lambda i: (-values[i], i))[:count])
    if config.choose == "ends":
        front = (count + 1) // 2
        return [*range(front), *range(total - (count - front), total)]
    return [round(i * (total - 1) / (count - 1)) for i in range(count)] if count > 1 else [0]


@torch.no_grad()
def layer_importance(target: Target, texts: Sequence[Tensor]) -> list[float]:
    """1 - cosine between the input and the output of each layer, the mean over all positions
    (ShortGPT, arXiv 2403.03853)."""
    sums, count = [0.0] * target.num_layers, 0

    def watch(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple, named: dict, output: Any) -> None:
            before = arguments[0] if arguments else named["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            sums[index] += float(
                (1 - nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)).sum()
            )

        return hook

    hooks = [
        layer.register_forward_hook(watch(i), with_kwargs=True)
        for i, layer in enumerate(layers_of(target)[1])
    ]
    try:
        for ids in texts:
            target.forward(ids[None].to(target.device))
            count += len(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return [value / max(count, 1) for value in sums]


def layers_of(target: Target) -> tuple[str, nn.ModuleList]:
    """The list of the target's decoder layers, and its name within the decoder. Raises
    `UserError`."""
    try:
        return decoder_layers(target.decoder, target.num_layers)
    except UserError as error:
        raise UserError(f"{error}; give student.path") from error


def _cut(config: StudentConfig, target: Target, texts: Callable[[], Sequence[Tensor]]) -> nn.Module:
    """A model of the target's architecture, smaller, with the target's weights where it has the
    same ones."""
    if getattr(target.model, "is_quantized", False):
        raise UserError(
            "the target's weights are quantised, a student cannot be cut from them; give "
            "student.path"
        )
    kept = chosen_layers(config, target.num_layers, lambda: layer_importance(target, texts()))
    small = smaller(config, target, kept)
    width = _Width(config, target, small, texts)
    try:
        student: Any = make_causal_lm(small, dtype=torch.float32)
        _copy_weights(config, target, student, kept, width)
    except UserError:
        raise
    # each architecture demands other things of its config, each in its own way
    except Exception as error:
        raise UserError(
            f"cannot cut a student from {target.config.model_type} ({first_line(error)}); give "
            "student.path or student.config"
        ) from error
    untied = (
        target.model.get_input_embeddings().weight
        is not target.model.get_output_embeddings().weight
    )
    if not width.narrow and not (config.head == "tie" and untied):
        _check_cut(target, Target(student, target.tokenizer, "student", frozen=False), kept)
    begin_calibrated(
        Target(student.to(target.device), target.tokenizer, "student", frozen=False),
        target,
        texts(),
    )
    return student


@torch.no_grad()
def begin_calibrated(student: Target, target: Target, texts: Sequence[Tensor]) -> float:
    """Scale the final norm of a student that was cut from `target` so that it is as sure as it is
    right; returns the factor.

    A few of many layers leave a state that is far from what the head expects, and logits as large
    as the target's, mostly wrong: with three of SmolLM2's thirty the loss began at 16. The factor
    is the one of `FACTORS` with which the student's distributions are nearest to the target's (KL)
    on some of the texts.
    """
    norm = student.final_norm()
    if norm is None:
        return 1.0
    losses = torch.zeros(len(FACTORS), dtype=torch.float64)
    for ids in texts[:CALIBRATION_TEXTS]:
        part = ids[None, :CALIBRATION_LENGTH].to(target.device)
        theirs, ours = (
            target.forward(part).last[0],
            student.forward(part.clamp(max=student.vocab_size - 1)).last[0],
        )
        log_p = log_probs(target.head(theirs))[:, : student.vocab_size]
        for i, factor in enumerate(FACTORS):
            log_q = log_probs(student.head(ours * factor))[:, : log_p.shape[-1]]
            losses[i] += divergence("kl", log_q, log_p, part[0]).double().sum().cpu()
    factor = FACTORS[int(losses.argmin())]
    return factor if factor == 1.0 or scale_norm(norm, factor, student.hidden_size) else 1.0


@torch.no_grad()
def scale_norm(norm: nn.Module, factor: float, size: int) -> bool:
    """Multiply what a final norm gives by `factor`, by way of its parameters; False, and nothing
    changed, where its form is not known. The forms are x * w, x * w + b and x * (1 + w),
    distinguished by trying."""
    parameters = dict(norm.named_parameters())
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    first = next(iter(parameters.values()))
    x = torch.linspace(-3, 4, size, device=first.device, dtype=first.dtype)[None]
    wanted = norm(x) * factor
    for offset in (0.0, 1.0):
        for parameter in parameters.values():
            parameter.mul_(factor).add_(offset * (factor - 1))
        if torch.allclose(norm(x), wanted, rtol=1e-3, atol=1e-4):
            return True
        for name, parameter in parameters.items():
            parameter.copy_(before[name])
    return False


def smaller(config: StudentConfig, target: Target, kept: list[int]) -> Any:
    """The target's config with fewer layers and tokens, and narrower if that is asked for. Raises
    `UserError`."""
    small: Any = copy.deepcopy(target.config)
    small.num_hidden_layers = len(kept)
    for name, value in small.to_dict().items():  # layer_types, no_rope_layers and their like
        if isinstance(value, list) and len(value) == target.num_layers:
            setattr(small, name, [value[i] for i in kept])
    if config.head == "tie":
        small.tie_word_embeddings = True
    if config.vocab_size is not None:
        if not max(target.eos_ids, default=0) < config.vocab_size <= target.vocab_size:
            raise UserError(
                f"student.vocab_size {config.vocab_size} must hold the target's end tokens and be "
                f"at most {target.vocab_size}"
            )
        small.vocab_size = config.vocab_size
        if (small.pad_token_id or 0) >= config.vocab_size:
            small.pad_token_id = None
    if config.narrow:
        _narrow(config, target.config, small)
    return small


def _narrow(config: StudentConfig, target: Any, small: Any) -> None:
    """Set the sizes of a narrower student in its config `small`; `target` is the target's."""
    hidden, inner = target.hidden_size, target.intermediate_size
    small.hidden_size = config.hidden_size or hidden
    small.intermediate_size = config.intermediate_size or round(inner * small.hidden_size / hidden)
    if small.hidden_size > hidden or small.intermediate_size > inner:
        raise UserError(
            "student.hidden_size and student.intermediate_size can be at most the target's"
        )
    # Whole groups of heads, of their old size: the rotary positions of a head belong to its size.
    size = getattr(target, "head_dim", None) or hidden // target.num_attention_heads
    kv_heads = getattr(target, "num_key_value_heads", None) or target.num_attention_heads
    shared = target.num_attention_heads // kv_heads
    groups = max(round(kv_heads * small.hidden_size / hidden), 1)
    small.num_key_value_heads, small.num_attention_heads, small.head_dim = (
        groups,
        groups * shared,
        size,
    )


@torch.no_grad()
def _copy_weights(
    config: StudentConfig, target: Target, student: Any, kept: list[int], width: _Width
) -> None:
    prefix, _ = layers_of(target)
    theirs = dict(target.decoder.state_dict())
    head = target.model.get_output_embeddings()
    if config.head == "tie":
        table = target.model.get_input_embeddings().weight
        name = next(
            name for name, parameter in target.decoder.named_parameters() if parameter is table
        )
        theirs[name] = head.weight
    for name, tensor in student.get_decoder().state_dict().items():
        tensor.copy_(width.cut(theirs, _in_target(name, prefix, kept), tensor.shape))
    student.tie_weights()
    if student.get_output_embeddings().weight is not student.get_input_embeddings().weight:
        for name, tensor in student.get_output_embeddings().state_dict().items():
            tensor.copy_(
                width.cut(
                    {f"lm_head.{name}": head.state_dict()[name]}, f"lm_head.{name}", tensor.shape
                )
            )


@torch.no_grad()
def _check_cut(target: Target, student: Target, kept: list[int]) -> None:
    """Demand that the student is the target with its other layers skipped: configs may hold more
    that belongs to one layer."""

    def skip(module: nn.Module, arguments: tuple, named: dict, output: Any) -> Any:
        before = arguments[0] if arguments else named["hidden_states"]
        return (before, *output[1:]) if isinstance(output, tuple) else before

    hooks = [
        layer.register_forward_hook(skip, with_kwargs=True)
        for i, layer in enumerate(layers_of(target)[1])
        if i not in kept
    ]
    try:
        ids = (torch.arange(24, device=target.device) * 7 % student.vocab_size)[None]
        theirs = target.forward(ids).last.float().cpu()
    finally:
        for hook in hooks:
            hook.remove()
    ours = student.forward(ids.cpu()).last.float()
    tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.1
    if not (error := float((ours - theirs).norm() / theirs.norm())) <= tolerance:
        raise UserError(
            f"layers {kept} of {target.config.model_type} alone are not what they are in the "
            "target (relative difference "
            f"{error:.1e}): the config says more of single layers than is known here; choose "
            "others, or give student.path"
        )


def _in_target(name: str, prefix: str, kept: list[int]) -> str:
    """The name of a student's tensor in the target's decoder."""
    if not name.startswith(prefix + "."):
        return name
    number, _, rest = name[len(prefix) + 1 :].partition(".")
    return f"{prefix}.{kept[int(number)]}.{rest}"


@torch.no_grad()
def loudest(target: Target, texts: Sequence[Tensor], count: int) -> Tensor:
    """The `count` dimensions of the residual stream of largest mean size over layers and positions,
    ascending (Minitron, arXiv 2407.14679)."""
    total = torch.zeros(target.hidden_size)
    for ids in texts:
        hidden = target.forward(ids[None].to(target.device), taps=tuple(range(target.num_layers)))
        for states in (*hidden.taps, hidden.last):
            total += (states[0].float().abs() / states.float().abs().mean()).sum(0).cpu()
    return total.topk(count).indices.sort().values


class _Width:
    """Which rows and columns a narrower student keeps. Knows matrices by the names that Llama,
    Mistral, Qwen, Gemma and their kin share; refuses others."""

    def __init__(
        self,
        config: StudentConfig,
        target: Target,
        small: Any,
        texts: Callable[[], Sequence[Tensor]],
    ) -> None:
        self.narrow = config.narrow
        if not self.narrow:
            return
        self._type = target.config.model_type
        self._dims = loudest(target, texts(), small.hidden_size)

    def cut(self, theirs: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
        """The part of the target's tensor `name` that the student's of `shape` starts as, in
        float32 on the CPU."""
        tensor = theirs[name].to("cpu", torch.float32)
        if not self.narrow:
            # a trimmed vocabulary keeps the first rows
            return tensor[: shape[0]] if tensor.dim() else tensor
        module, kind = name.split(".")[-2:]
        if module in ("q_norm", "k_norm") or (
            module in ("q_proj", "k_proj", "v_proj") and kind == "bias"
        ):
            return tensor[: shape[0]]
        if "norm" in module and tensor.dim() == 1:
            return tensor[self._dims]
        if module in ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj"):
            return tensor[: shape[0], self._dims]
        if module in ("gate_proj", "up_proj"):
            return tensor[self._neurons(theirs, name, shape[0])][:, self._dims]
        if module == "o_proj" and kind == "weight":
            return tensor[self._dims, : shape[1]]
        if module == "down_proj" and kind == "weight":
            return tensor[self._dims][:, self._neurons(theirs, name, shape[1])]
        raise UserError(
            f"a narrower student cannot be cut from {self._type}: {name} is not known; leave out "
            "student.hidden_size and "
            "intermediate_size, or start from student.config"
        )

    def _neurons(self, theirs: dict[str, Tensor], name: str, count: int) -> Tensor:
        """The `count` neurons of the MLP that `name` belongs to whose output columns are largest,
        ascending."""
        down = theirs[name.rpartition("mlp.")[0] + "mlp.down_proj.weight"].to("cpu", torch.float32)
        return down[self._dims].norm(dim=0).topk(count).indices.sort().values
