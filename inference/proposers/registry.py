"""Drafters by name: the text that a user gives, the kinds of drafters, and loading.

A method's module in `proposers/` is imported when a drafter of that method is loaded.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ...heads.artifact import OWN_FILE, Artifact, own_method, read_own_file
from ...heads.errors import UserError
from ...heads.files import read_json
from ...heads.layout import place
from ..base.settings import DTYPES, dtype_named
from ..base.tree_settings import LOOKUP_SETTINGS, TREE_SETTINGS, TreeSettings, positive
from ..targets.target import Target, TargetSource
from .contract import DrafterSpec, Proposer
from .custom_drafters import check_own, checked_proposer, class_named, is_class_path, make_own
from .default_tree import default_tree, expected_tokens
from .draft_model import MODEL_FOLDER
from .kind import Kind, Setting, Settings
from .ngram import NgramLookup, PlainDecoding
from .tree_plan import Planned, TreePlan
from .with_lookup import WithLookup

log = logging.getLogger(__name__)

UNTRAINED = {
    "none": Kind(PlainDecoding, trained=False),
    "ngram": Kind(NgramLookup, own=("length", "longest", "shortest"), trained=False),
}
"""Drafters that need no training, by the name that a user gives."""
FORMER = {"suffix": "ngram:longest=8", "lookahead": "ngram", "early-exit": "ngram"}
"""Drafters of earlier versions, and what accepts more in their place."""

SPELLING = (
    f"a drafter's folder, a small model's folder, one of {', '.join(UNTRAINED)}, or "
    "module:Class of your own; settings follow a colon: ngram:length=8"
)

WHOLE_NUMBERS = ("length", "width", "nodes", "slots", "layers", *LOOKUP_SETTINGS)
"""Settings that are numbers of at least 1, where they are given."""

NAME = re.compile(r"[\w.+-]{1,40}")
"""Names that a user may give to drafters."""


def parse_spec(spec: str) -> tuple[str, Settings]:
    """Split `name[:key=value,...]` into name and settings. Raises `UserError`."""
    name, colon, rest = spec.rpartition(":")
    # A colon may belong to a path: what follows it is settings only if it looks like them. Those
    # of a drafter of another package may be paths.
    if not colon or "=" not in rest or ("/" in rest and not is_class_path(name)):
        return spec, {}
    settings: Settings = {}
    for item in rest.split(","):
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UserError(f"drafter {spec!r}: {item!r} is not key=value")
        key = key.strip().replace("-", "_")
        if key in settings:
            raise UserError(f"drafter {spec!r}: {key} is given twice; give it once")
        value = value.strip()
        if key == "dtype":
            settings[key] = dtype_named(value)
        elif key == "name":
            settings[key] = value
        elif re.fullmatch(r"-?[0-9]+", value):
            settings[key] = int(value)
        else:
            settings[key] = float(value) if re.fullmatch(r"-?[0-9]*\.[0-9]+", value) else value
    return name, settings


def without_tree(spec: str | Path, others: tuple[str, ...] = ()) -> str:
    """Return `spec` with only the settings that do not concern its tree, and without `others`.

    Example: `ngram:longest=5,length=9` becomes `ngram:longest=5`.
    """
    name, settings = parse_spec(str(spec))
    tree = (*TREE_SETTINGS, *others)
    rest = written({key: value for key, value in settings.items() if key not in tree})
    return f"{name}:{rest}" if rest else name


def check_spec(spec: str | Path) -> tuple[str, Settings]:
    """Return name and settings of `spec`, before target and drafter are loaded.

    The name of a trained drafter is its folder. Raises `UserError` unless the name may be a
    drafter's, and for settings that no drafter of its kind can have. The files of a folder are
    judged when it is loaded.
    """
    name, settings = parse_spec(str(spec))
    first = name.partition(":")[0]
    if first in UNTRAINED and first != name:
        raise UserError(f"drafter {spec}: settings are written key=value, such as {first}:length=8")
    if not (name in UNTRAINED or Path(name).is_dir() or is_class_path(name)):
        word = name.lower().replace("_", "-")
        near = (
            [FORMER[word]] if word in FORMER else difflib.get_close_matches(word, UNTRAINED, 1, 0.7)
        )
        meant = f"did you mean {near[0]}? Give" if near else "give"
        raise UserError(f"{name} is not a drafter: there is no such folder; {meant} {SPELLING}")
    check_name(name, settings.get("name"))
    if is_own_drafter(name) and hasattr(class_named(name), "drafter_class"):
        name = trained_folder(name, settings.pop("folder", None))
    if is_own_drafter(name):
        check_own(name, {key: value for key, value in settings.items() if key != "name"})
    elif settings and (kind := kind_of(name)) is not None:
        check_settings(kind, name, settings)
    return name, settings


def trained_folder(method: str, folder: object) -> str:
    """Return the folder of a drafter that a method of another package has trained.

    Raises `UserError` if it is not given, or is that of another method.
    """
    if not isinstance(folder, str):
        raise UserError(f"drafter {method} is trained; name its folder: {method}:folder=RUN/best")
    if (found := read_own_file(Path(folder)).method) != method:
        raise UserError(f"{folder} is a drafter of method {found}, not {method}")
    return folder


def is_own_drafter(name: str) -> bool:
    """Return true for a drafter of another package, not a name or a folder here."""
    return name not in UNTRAINED and not Path(name).is_dir() and is_class_path(name)


def refuse_own(spec: str, what: str) -> None:
    """Raise `UserError` if `spec` is a drafter of another package, which `what` cannot take."""
    name, _ = parse_spec(spec)
    if is_own_drafter(name):
        raise UserError(f"{what} knows the trees of draftsmith's own drafters only, not {name}")


def check_name(drafter: str, name: Setting) -> None:
    """Raise `UserError` for a name, given by a user, that tables cannot show."""
    if name is not None and not NAME.fullmatch(str(name)):
        raise UserError(
            f"drafter {drafter}: name={name} is not a valid name; use letters, digits, . _ - and "
            "+, at most 40"
        )
    if name in (*UNTRAINED, "plain"):
        raise UserError(f"drafter {drafter}: name={name} is another drafter's; choose another")


def kind_of(name: str) -> Kind | None:
    """Return the kind of the drafter of this name or folder; None where its files do not tell."""
    if name in UNTRAINED:
        return UNTRAINED[name]
    if not Path(name, OWN_FILE).is_file():
        return MODEL_FOLDER if Path(name, "config.json").is_file() else None
    return trained_kind(method_of(name))


def method_of(folder: str) -> str:
    """Return the method of the drafter in a folder; empty if its files do not name one."""
    try:
        facts = read_json(Path(folder, OWN_FILE))
    except UserError:  # a draft model's folder, or a damaged file, which loading explains
        return ""
    method = facts.get("method") if isinstance(facts, dict) else None
    return method if isinstance(method, str) else ""


def trained_kind(method: str) -> Kind | None:
    """Return the kind of a method's drafters, `KIND` in its file in `proposers/`; None without."""
    if (own := own_method(method)) is not None:
        return Kind(own.proposer_class, tree=own.tree_settings)
    # A name with dots, from a damaged file, could import a module from anywhere.
    if not method.isidentifier() or find_spec(f".{method}", __package__) is None:
        return None
    return getattr(import_module(f".{method}", __package__), "KIND", None)


def check_settings(kind: Kind, drafter: str, settings: Settings) -> None:
    """Raise `UserError` for settings that no drafter of this kind can have."""
    arguments = kind.arguments(drafter, settings)
    arguments.pop("name", None)
    check_drafter_dtype(settings.get("dtype"))
    for key, value in settings.items():
        if key in WHOLE_NUMBERS:
            positive(key, value)
    if "lookup_length" in settings and "lookup" not in settings:
        raise UserError(
            f"drafter {drafter}: lookup_length is the length of a looked-up chain; give lookup "
            "too, the number of last tokens that must have occurred before: lookup=4"
        )
    if kind.tree:
        tree = arguments["settings"]
        if isinstance(tree, TreeSettings) and tree.shape is None:
            # It raises for settings that exclude each other in every drafter.
            TreePlan(tree.or_else(length=1, width=1 if kind.chains else 2))
    elif kind in UNTRAINED.values():
        kind.make(**arguments)


def load_proposer(
    spec: str | Path,
    target: TargetSource,
    warn: Callable[[str], None],
    tuned: Settings | None = None,
    choose: bool = False,
    inform: Callable[[str], None] = log.info,
) -> Proposer:
    """Return the drafter that `spec` names (see `SPELLING`), ready to work on `target`.

    The settings `tuned` replace those of `spec` that concern its tree. With `choose` a trained
    drafter without settings drafts the tree that its artifact names for the target's device, or
    else the one that is expected to pay there, and `inform` gets a line about it (`warn`, if none
    is expected to); otherwise it drafts as it was evaluated in training. `warn` gets notices for
    the user. Raises `UserError`.
    """
    text = str(spec) if tuned is None else without_tree(spec)
    name, settings = check_spec(text)
    settings.pop("name", None)
    # The settings in the proposer's name; those that a profile has chosen are not.
    shown = {key: settings[key] for key in settings if tuned is None or key in LOOKUP_SETTINGS}
    settings |= tuned or {}
    if is_own_drafter(name):
        if tuned is not None:
            refuse_own(name, "a profile, tune or --like")
        proposer, shown = make_own(name, settings, target), {}
    elif name in UNTRAINED:
        kind = UNTRAINED[name]
        proposer = kind.make(**kind.arguments(name, settings))
    elif kind_of(name) is MODEL_FOLDER:
        proposer = MODEL_FOLDER.make(name, target, **MODEL_FOLDER.arguments(name, settings))
    else:
        proposer = _load_trained(name, settings, target, warn, inform if choose else None)
    proposer.spec = DrafterSpec(text, "" if tuned is None else ":tuned")
    proposer.name += (f":{written(shown)}" if shown else "") + proposer.spec.suffix
    return proposer


def _load_trained(
    folder: str,
    settings: Settings,
    target: TargetSource,
    warn: Callable[[str], None],
    inform: Callable[[str], None] | None,
) -> Proposer:
    """Return the proposer of an artifact, with a lookup if the settings name one.

    With `inform`, a default tree is chosen where no setting concerns the tree. Raises `UserError`.
    """
    dtype = check_drafter_dtype(settings.pop("dtype", None)) or target.dtype
    lender = target.embedding_and_head_in(dtype)
    # A folder without a drafter's files comes here too: the error says what is missing.
    artifact = Artifact.load(folder, target.fingerprint(), lender, warn)
    place(artifact.drafter, target.device, dtype)
    kind = kind_made_of(artifact)
    lookup: dict[str, Any] = {}
    if kind.lookups:
        lookup = {key: settings.pop(key) for key in LOOKUP_SETTINGS if key in settings}
    if inform is not None and not settings:
        assert isinstance(target, Target)
        settings = _default_settings(artifact, target, folder, warn, inform)
    made = kind.make(artifact, **kind.arguments(folder, settings))
    proposer = checked_proposer(made, target, artifact.method)
    if isinstance(proposer, Planned):
        # Nothing else has this drafter, which was read from its files just now.
        proposer.prepare_weights(isinstance(target, Target) and target.reference)
        if lookup:
            lookup["prior"] = expected_tokens(artifact.calibration, proposer.plan)
            return WithLookup(proposer, **lookup)
    return proposer


def _default_settings(
    artifact: Artifact,
    target: Target,
    name: str,
    warn: Callable[[str], None],
    inform: Callable[[str], None],
) -> Settings:
    """Return the settings of a drafter's default tree, none without; a line tells the user."""
    if (best := default_tree(artifact, target)) is None:
        return {}
    drawn, device = written(best.settings), target.device.type
    if best.gain is None:
        inform(f"{name} drafts with {drawn}, the tree that it names for a {device}")
    elif best.gain > 1:
        inform(f"{name} drafts with {drawn}, the tree expected to be fastest on a {device}")
    else:
        warn(
            f"no tree of {name} is expected to gain on a {device}: with the best, {drawn}, some "
            f"{best.gain:.2f}x the speed of plain decoding"
        )
    return best.settings


def written(settings: Settings) -> str:
    """Return settings as a user writes them: `length=4,width=1`."""
    return ",".join(f"{key}={value}" for key, value in settings.items())


def check_drafter_dtype(name: Setting) -> torch.dtype | None:
    """Return the type that a drafter's setting `dtype` names, None for None. Raises `UserError`."""
    if name is None:
        return None
    if name not in DTYPES:
        raise UserError(f"unsupported drafter dtype {name}; choose from {', '.join(DTYPES)}")
    return getattr(torch, str(name))


def kind_made_of(artifact: Artifact) -> Kind:
    """Return the kind of a loaded drafter."""
    kind = trained_kind(artifact.method)
    assert kind is not None, "every module in heads/ has one in proposers/"
    return kind


def proposer_of(artifact: Artifact, **settings: Setting) -> Proposer:
    """Return the proposer of a loaded drafter with these settings. Raises `UserError`."""
    kind = kind_made_of(artifact)
    return kind.make(artifact, **kind.arguments(artifact.method, settings))
