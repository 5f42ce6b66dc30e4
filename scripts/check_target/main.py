"""Does everything work with this model? A little of each command, on one target; run by
`scripts/check_target.sh`."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from pathlib import Path

from arguments import parsed
from rich.console import Console
from rich.table import Table
from runner import Outcome, Runner, run_isolated
from shapes import make_shape
from steps import Plan, every_step

# The steps run in forks of this process: what is imported here, none of them imports again. Nothing
# may be computed here.
import draftsmith.inference.evaluation.evaluate
import draftsmith.train.loop  # noqa: F401
from draftsmith.heads.errors import UserError

GIB = 2**30
COLORS = {"pass": "green", "FAIL": "red", "skipped": "yellow"}


def main() -> None:
    options = parsed()
    try:
        folder, target = prepared(options)
        steps = every_step(
            Plan(
                target,
                folder,
                options.dtype,
                options.tokens,
                options.steps,
                options.ranks,
                options.quick,
            )
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if options.only:
        words = options.only.split(",")
        steps = [step for step in steps if any(step.name.startswith(word) for word in words)]
    console = Console()
    console.print(f"{target}: {len(steps)} steps, logs in {folder}/logs")
    runner = Runner(folder / "logs", options.timeout, lambda outcome: tell(console, outcome))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    try:
        for step in steps:
            runner.run(step)
    except KeyboardInterrupt:
        print("interrupted: this is what was done so far", file=sys.stderr)
    table(console, target, runner.outcomes, len(steps))
    failed = [outcome for outcome in runner.outcomes if outcome.result != "pass"]
    raise SystemExit(1 if failed or len(runner.outcomes) < len(steps) else 0)


def prepared(options: argparse.Namespace) -> tuple[Path, str]:
    """The output folder, empty but for a target made before, and the target's path. Raises
    `UserError`."""
    name = options.shape or Path(options.target).name
    if options.layers is not None:
        name += f"-{options.layers}-layers"
    folder = options.out or Path("runs/check") / name
    if folder.exists() and not (folder / "logs").is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} holds something else; name another --out")
    folder.mkdir(parents=True, exist_ok=True)
    for part in folder.iterdir():
        if part.name != "target":
            shutil.rmtree(part) if part.is_dir() else part.unlink()
    (folder / "logs").mkdir()
    if options.shape is None:
        return folder, options.target
    target = folder / "target"
    run_isolated(lambda: make_shape(options.shape, target, options.layers) and None)
    return folder, str(target)


def tell(console: Console, outcome: Outcome) -> None:
    """One line when a step ends."""
    color = COLORS[outcome.result]
    line = f"[{color}]{outcome.result:<7}[/] {outcome.name:<34} {outcome.seconds:6.1f} s"
    console.print(line, highlight=False)
    if outcome.result == "FAIL":
        console.print(f"        {outcome.remark}", style="red", highlight=False, markup=False)


def table(console: Console, target: str, outcomes: list[Outcome], expected: int) -> None:
    found = Table("step", "result", "seconds", "peak GiB", "remark", title=f"{target}")
    for column in found.columns[2:4]:
        column.justify = "right"
    for outcome in outcomes:
        peak = f"{outcome.peak_bytes / GIB:.1f}" if outcome.peak_bytes else "-"
        result = f"[{COLORS[outcome.result]}]{outcome.result}[/]"
        found.add_row(outcome.name, result, f"{outcome.seconds:.1f}", peak, outcome.remark)
    console.print(found)
    passed = sum(outcome.result == "pass" for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    peak = max((outcome.peak_bytes for outcome in outcomes), default=0)
    console.print(
        f"{passed} of {expected} passed in {seconds:.0f} s; at most {peak / GIB:.1f} GiB in one "
        "process"
    )


if __name__ == "__main__":
    main()
