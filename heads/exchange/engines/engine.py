"""`ServingEngine`: what draftsmith knows of one engine, and the parts that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from ...files import JsonObject

Files = tuple["JsonObject", "dict[str, Tensor]"]
"""`config.json` and the tensors stored with it."""


@dataclass(frozen=True)
class ExportRequest:
    """Request for one export, as the user made it."""

    engine: str
    out: str
    """Folder of the export, by the name that the serve command uses."""
    target: str
    """Name of the target in the serve command."""
    drafts: int
    """Drafts of a round in the serve command."""
    dtype: torch.dtype
    """Type in which floating tensors are stored."""


@dataclass(frozen=True)
class DrafterFacts:
    """A drafter as engines see it."""

    drafter: Any
    """Module with the interface of `DrafterModule`."""
    family: str
    """The target's model type."""
    vocab_size: int
    """Number of tokens in the target's vocabulary."""
    numbers: JsonObject
    """Values of the target's configuration, see `Fingerprint.numbers`; empty if not known."""

    @property
    def kind(self) -> str:
        """Kind of the drafter, by which engines list what they take."""
        return self.drafter.kind

    @property
    def shape(self) -> Any:
        return self.drafter.shape

    @property
    def embedding_scale(self) -> float:
        """Factor by which the target's embedding multiplies the rows of its matrix."""
        return self.drafter.embedding_and_head.scale


@dataclass(frozen=True)
class NativeFiles:
    """Files in draftsmith's own layout, of which an engine's are made."""

    config: JsonObject
    tensors: dict[str, Tensor]
    """Copies, which may be changed."""
    facts: DrafterFacts
    drafts: int
    """Drafts of a round."""


EAGLE_TAPS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class FileLayout:
    """Form of the files that an engine reads."""

    name: str
    """Name in draftsmith.json."""
    write: Callable[[NativeFiles], Files]
    read_as: str | None = None
    """Beginning of the importer's name of it; None: the drafter's kind."""
    has_target_head: bool = False
    """True if its readers know the target's head, as draftsmith does: files need no copy of it."""


def _with_output_biases(files: NativeFiles) -> Files:
    """Return the files, with zeros for the bias of an output projection.

    Where queries, keys and values have biases, engines give the output projection one too. If the
    file had none, it would hold random numbers.
    """
    tensors = files.tensors
    # The names are listed first, because the loop adds to the table.
    for name in [name for name in tensors if name.endswith("q_proj.bias")]:
        output = name.replace("q_proj", "o_proj")
        weight = tensors[output.replace("bias", "weight")]
        tensors[output] = weight.new_zeros(len(weight))
    return files.config, tensors


NATIVE = FileLayout("native", _with_output_biases)
"""draftsmith's own layout, which most engines read."""


@dataclass(frozen=True)
class Remark:
    """Sentence about a drafter: a limit of an engine, or a note."""

    found: Callable[[DrafterFacts], object]
    """Function that returns something true where the sentence holds."""
    text: str
    """In braces it may name values of the drafter's `shape`, of the `facts`, and what was `found`.
    """

    def __call__(self, facts: DrafterFacts) -> str | None:
        """Return the sentence about a drafter; None where it does not hold."""
        if not (found := self.found(facts)):
            return None
        shape = getattr(facts.drafter, "shape", None)  # Medusa heads and draft models have none
        return self.text.format(facts=facts, shape=shape, found=found)


@dataclass(frozen=True)
class Recipe:
    """Export of one kind of drafter to one engine, and its serve command."""

    serve: Callable[[ExportRequest, Any], str]
    """Function of a request and the drafter that returns the serve command."""
    notes: tuple[str | Remark, ...] = ()
    """Remarks for the user."""
    limits: tuple[Remark, ...] = ()
    """Reasons why the engine cannot serve a drafter. One that it would load, and silently compute
    otherwise, counts as one that it cannot serve."""
    layout: FileLayout = NATIVE

    def notes_for(self, facts: DrafterFacts) -> list[str]:
        """Return the remarks that hold for a drafter."""
        always = [note for note in self.notes if isinstance(note, str)]
        return always + self.remarks_for(facts)

    def remarks_for(self, facts: DrafterFacts) -> list[str]:
        """Return the remarks that hold for this drafter and not for every one of its kind."""
        notes = [note for note in self.notes if not isinstance(note, str)]
        return [said for note in notes if (said := note(facts)) is not None]


Settings = dict[str, Any]
Shape = Callable[[Any, Settings], Settings]
"""Function of a proposer and an engine's settings that returns the settings with which the proposer
drafts as in the engine. Raises `UserError` for settings that do not fit it."""


@dataclass(frozen=True)
class EngineEmulation:
    """Speculation of an engine, for `draftsmith evaluate --like`."""

    settings: Settings
    """Names of the settings with their defaults."""
    shapes: Mapping[str, Shape]
    """Functions of the drafts by kinds of drafters; `ngram` is the lookup of n-grams."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of the settings that are words; the others are whole numbers."""
    least: Mapping[str, int] = field(default_factory=dict)
    """Smallest values of whole numbers; 1 where none is given."""
    rule: Callable[[str, Settings], Literal["match", "rejection", "recursive"]] = (
        lambda _kind, _settings: "match"
    )
    """Acceptance rule at T > 0, by kind of drafter. A greedy draft has a one-hot distribution, and
    every lossless rule accepts its token with the target's probability of it, as acceptance by
    match does."""


def chain(_: Any, settings: Settings) -> Settings:
    return {"length": settings["drafts"], "width": 1}


def block(proposer: Any, settings: Settings) -> Settings:
    """Return the settings of a block drafter: a chain, and a block of just as many slots.

    Slots of a block see each other. An engine that drafts less runs a shorter block, and the drafts
    of a shorter block are other ones than the first of a longer.
    """
    drafts = min(settings["drafts"], proposer.longest)
    return {"length": drafts, "width": 1, "slots": drafts + proposer.first_slot}


def lookup(_: Any, settings: Settings) -> Settings:
    return {"length": settings["drafts"]}


# What `--server` has to know of an engine: its requests, streams and counts.

Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Token = Annotated[int, Meta(ge=0, le=1 << 24)]


@dataclass(frozen=True)
class ServerFacts:
    """Facts about a server from its own answers."""

    version: str
    """Empty where the server does not give it."""
    speculates: bool | None = None
    """None where the answers do not say it."""
    context: int | None = None
    """Tokens that a prompt and its reply may have together, where /v1/models does not say it."""


@dataclass(frozen=True)
class CounterNames:
    """Names of an engine's Prometheus counters, which all requests share.

    Those of speculation are called `spec_decode_num_..` after the prefix. Libraries for Prometheus
    add `_total` to a counter's name, depending on their version; it is left out here.
    """

    prefix: str
    generated: str
    """Tokens written for all clients."""
    running: tuple[str, ...]
    """Requests in the engine, waiting ones included."""
    chunk_of_step: bool = False
    """True if each step sends a chunk, false if each token has its own."""


@dataclass(frozen=True)
class ReplyCounts:
    """Names of the counts that come with each reply; several names are of different versions."""

    rounds: str
    accepted: tuple[str, ...]
    drafted: tuple[str, ...]
    histograms: tuple[str, ...]
    """Element i of a histogram counts the rounds that accepted i drafts."""
    definition: str
    """Definition of tau where a reply has no count of accepted drafts."""


@dataclass(frozen=True)
class ServerProtocol:
    """Form of an engine's answers, requests and streams."""

    paths: tuple[str, ...]
    """Paths that are asked for in order to recognise it."""
    recognise: Callable[[Sequence[Any]], ServerFacts | None]
    """Function of the JSON at `paths`, None for a path without an answer; it returns None for
    another engine."""
    request: Callable[[str, list[int], Any, int], tuple[str, JsonObject]]
    """Function of the model's name, the prompt, a `Sampling` and the largest number of tokens that
    returns path and body. All settings are given, because a server has its own defaults."""
    chunk: type
    """Type of an event of the stream; keys that it does not list are ignored."""
    read: Callable[[Any, Any, float], None]
    """Adds what a chunk brought at a time to a `ServerReply`."""
    counts: CounterNames | ReplyCounts
    definition: str
    """Definition of the server's tau."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of all requests."""
    no_metrics: str = "give --server the engine itself, not a gateway before it"
    """Remedy if counters are missing."""
    no_tokens: str | None = None
    """Why the engine is refused if its counters do not count tokens; None if that is allowed."""


@dataclass(frozen=True)
class ServingEngine:
    """Everything that draftsmith knows of one engine."""

    name: str
    """Name in options."""
    title: str
    """Name in sentences."""
    recipes: Mapping[str, Recipe]
    """Exports by kind of drafter."""
    place: int = 100
    """Place in lists of engines."""
    in_process: bool = False
    """True if it decodes in the user's own process, and nothing is served."""
    card_tags: tuple[str, ...] = ()
    """Tags of an export's card, by which the hub finds it."""
    like: EngineEmulation | None = None
    """None if `--like` does not imitate it."""
    server: ServerProtocol | None = None
    """None if `--server` does not measure it."""
    add_files: Callable[[Path], None] = lambda _folder: None
    """Writes further files into the folder of an export."""

    def obstacle(self, facts: DrafterFacts) -> str | None:
        """Return why the engine cannot serve a drafter; None if it can, or takes no such kind."""
        recipe = self.recipes.get(facts.kind)
        reasons = (limit(facts) for limit in (recipe.limits if recipe is not None else ()))
        return next((reason for reason in reasons if reason is not None), None)
