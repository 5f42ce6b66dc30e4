"""`draftsmith evaluate --features STORE`: tau of drafters by replay on a store's held-out texts.

The target itself is not needed. The texts are its own greedy replies, so in fp32 the counts are
those of decoding them (`replay.rounds_on_text`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
import transformers

from ...heads.errors import UserError
from ...heads.files import JsonObject, output_json
from ...heads.layout import dtype_name
from ..console import Console, Progress, warn
from ..drafters import load_proposer
from ..metrics import repeats_itself, survival, tau
from ..proposer import Proposer
from ..replay import rounds_on_text
from ..targets.stored import HeldOutText, StoredTarget, load_stored, load_texts, manifest_of
from .intervals import tau_interval
from .names import distinct_names
from .options import EvaluateOptions
from .results import NOTHING, by_depth, interval_text, written
from .tables import ACCEPTED, table_of


def run(options: EvaluateOptions) -> None:
    """Replay the drafters of `options`, print a table, write the JSON file. Raises `UserError`."""
    if not options.sampling.greedy:
        raise UserError(
            "--features replays greedy texts; leave out --temperature, or give --target to decode"
        )
    if not options.drafter:
        raise UserError("--features needs a --drafter to replay")
    assert options.features is not None
    target = load_stored(options.features, options.target.device)
    target.allow_added_tokens = options.target.allow_added_tokens
    manifest = manifest_of(options.features)
    proposers = [load_proposer(spec, target, warn) for spec in options.drafter]
    drafters = {}
    named = zip(distinct_names(proposers), options.drafter, proposers, strict=True)
    texts: list[HeldOutText] = []
    for name, spec, proposer in named:
        if missing := set(proposer.taps) - set(manifest.taps):
            raise UserError(
                f"{name} reads the taps {list(proposer.taps)}, and {options.features} has "
                f"{manifest.taps}; extract {sorted(missing)} too (heads.taps)"
            )
        texts = load_texts(options.features, proposer.taps)[: options.limit]
        drafters[name] = {"spec": spec} | replayed(name, proposer, target, texts)
    report = {
        "schema_version": 2,
        "replayed_from": options.features,
        "target": target.fingerprint().as_dict(),
        "dtype": dtype_name(target.dtype),
        "versions": {"torch": str(torch.__version__), "transformers": transformers.__version__},
        "options": asdict(options),
        "loop_share": sum(repeats_itself(text.ids[text.start :]) for text in texts) / len(texts),
        "temperature": manifest.held_out.get("temperature", 0.0),
        "drafters": drafters,
    }
    if not output_json(options.json, report):
        show(report, len(texts))


def replayed(
    name: str, proposer: Proposer, target: StoredTarget, texts: Sequence[HeldOutText]
) -> JsonObject:
    """Return tau, its 95% interval over texts, survival by depth, and the rounds themselves.

    `name` is the drafter's in the progress bar. The key `emitted` has the tokens emitted in each
    round of each text.
    """
    emitted = []
    for text in Progress(texts, desc=f"replaying {name}", unit=" texts"):
        ids = torch.tensor(text.ids, device=target.device)
        hidden = text.hidden.map(lambda states: states.to(target.device, target.dtype))
        emitted.append(rounds_on_text(proposer, ids, text.start, hidden))
    # a round that the end of its text cuts counts what it emitted, not what it accepted before
    accepted: list[int] = []
    for rounds in emitted:
        accepted += [tokens - 1 for tokens in rounds]
    return {
        "tau_incl_bonus": tau(emitted),
        "tau_ci95": tau_interval(emitted, [text.unit for text in texts], proposer.max_drafted),
        "survival": survival(accepted, max(accepted, default=0)),
        "emitted": emitted,
    }


def show(report: JsonObject, texts: int) -> None:
    """Print the table of drafters; `texts` is the number of texts that were replayed."""
    sampled = report["temperature"]
    replies = f"replies at temperature {sampled:g}" if sampled else "greedy replies"
    title = (
        f"{report['target']['name']}\nreplay on {texts} held-out {replies} of "
        f"{report['replayed_from']}, {report['dtype']}"
    )
    rows = []
    for name, figures in report["drafters"].items():
        rows.append({
            "drafter": name,
            "tau": written(figures["tau_incl_bonus"]),
            "95%": interval_text(figures["tau_ci95"]) or NOTHING,
            ACCEPTED: by_depth(figures["survival"]),
        })  # fmt: skip
    console = Console()
    console.print(table_of(title, rows).terminal())
    console.print(
        f"tau: tokens a round. Loop share: {report['loop_share']:.0%}; loops flatter every drafter."
    )
