"""`draftsmith evaluate --features STORE`: tau of drafters by replay on a feature store's held-out
texts, without the target.

The texts are the target's own greedy replies, so in fp32 the counts are those of decoding them
(`replay.rounds_on_text`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers
from rich import box
from rich.table import Table

from ...heads.errors import UserError
from ...heads.files import whole_file, write_json
from ..console import Console, Progress
from ..metrics import bootstrap, repeats_itself, survival, tau
from ..proposer import Proposer, load_proposer
from ..replay import rounds_on_text
from ..stored import HeldOutText, StoredTarget, load_stored, load_texts
from ..target import Hidden

SHOWN = 3


def run(options: Any) -> None:
    """`options` of `evaluate`; raises `UserError` for those that only decoding can answer."""
    if not options.sampling.greedy:
        raise UserError(
            "--features replays greedy texts; leave out --temperature, or give --target to decode"
        )
    if not options.drafter:
        raise UserError("--features needs a --drafter to replay")
    target = load_stored(options.features, options.target.device)
    texts = load_texts(options.features)[: options.limit]

    def warn(message):
        return print(f"warning: {message}", file=sys.stderr)

    drafters = {}
    for spec in options.drafter:
        proposer = load_proposer(spec, target, warn)
        drafters[proposer.name] = replayed(proposer, target, texts)
    report = {
        "schema_version": 1,
        "replayed_from": options.features,
        "target": target.fingerprint().as_dict(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "options": asdict(options),
        "loop_share": sum(repeats_itself(text.ids[text.start :]) for text in texts) / len(texts),
        "drafters": drafters,
    }
    if options.json is not None:
        with whole_file(options.json) as aside:
            write_json(aside, report)
    show(report, len(texts))


def replayed(
    proposer: Proposer, target: StoredTarget, texts: Sequence[HeldOutText]
) -> dict[str, Any]:
    """Tau, its 95% interval over texts, survival by depth, and the rounds themselves: tokens kept
    in each."""
    kept = []
    for text in Progress(texts, desc=f"replaying {proposer.name}", unit=" texts"):

        def there(states):
            return states.to(target.device, target.dtype)

        hidden = Hidden(there(text.hidden.last), tuple(there(tap) for tap in text.hidden.taps))
        kept.append(
            rounds_on_text(
                proposer, torch.tensor(text.ids, device=target.device), text.start, hidden
            )
        )
    accepted = [tokens - 1 for rounds in kept for tokens in rounds]
    return {
        "tau_incl_bonus": tau(kept),
        "tau_ci95": bootstrap(kept, tau),
        "survival": survival(accepted, max(accepted, default=0)),
        "kept": kept,
    }


def show(report: dict[str, Any], texts: int) -> None:
    """Print the table a person looks at."""
    title = (
        f"{report['target']['name']}\nreplay on {texts} held-out greedy replies of "
        f"{report['replayed_from']}, {report['dtype']}"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("drafter", overflow="fold", min_width=18)
    for column in ("tau", "95%", f"accepted 1-{SHOWN}"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, found in report["drafters"].items():
        low, high = found["tau_ci95"]
        shown = " ".join(f"{x:.2f}".removeprefix("0") for x in found["survival"][:SHOWN]) or "-"
        table.add_row(name, f"{found['tau_incl_bonus']:.2f}", f"{low:.2f}-{high:.2f}", shown)
    console = Console()
    console.print(table)
    console.print(
        f"tau: tokens a round. Loop share: {report['loop_share']:.0%}; loops flatter every drafter."
    )
