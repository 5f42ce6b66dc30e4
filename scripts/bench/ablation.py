"""Tau of the variants of a recipe at equal data, over seeds, each at the best rate of its own.

    python scripts/bench/ablation.py scripts/bench/ablations/eagle-quickstart.yaml --out runs/eagle
    python scripts/bench/ablation.py PLAN --out OUT --only quickstart --only adamw
    python scripts/bench/ablation.py PLAN --out OUT --table

A plan names a training configuration, the variants with the options in which each differs from it,
and the rates to begin with for each optimiser. Every variant is trained with the first seed at the
rate of its optimiser, at twice and at half of that, and further in the better direction while the
estimated tau of the held-out texts rises. It is trained with the other seeds at the best rate.
`draftsmith evaluate` then decodes the plan's test prompts with the drafters of all seeds. Runs that
are finished are not made again, and one that was interrupted goes on.

The table has the mean of tau over the seeds with a 95% interval (Student's t), and its ratio to the
first variant, paired by seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore

import msgspec
from rich.console import Console
from rich.table import Table

from draftsmith.heads.errors import UserError
from draftsmith.inference.evaluation.intervals import student_t
from draftsmith.inference.evaluation.results import read_report

Options = dict[str, object]
FURTHEST = 4
"""Largest number of times that a rate is doubled or halved."""


class Plan(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One ablation, as its file states it."""

    method: str
    config: str
    options: Options = {}
    """Options of every run; `{seed}` is replaced by the seed: a store has its order."""
    rates: dict[str, float]
    """Rate to begin with, by optimiser."""
    optimizer: str
    """Optimiser of a variant that names none."""
    seeds: list[int]
    target: str
    prompts: str
    """Test prompts."""
    new_tokens: int = 128
    batch: int = 1
    """Test prompts decoded together."""
    temperature: float = 0.0
    """Temperature of the test prompts' replies."""
    trees: dict[str, str]
    """Settings of a drafter, by the name that the table gives them."""
    variants: dict[str, Options]


@dataclass(frozen=True)
class Runner:
    """Starter of the commands of an ablation, a limited number at one time."""

    places: AbstractContextManager[object]
    gpu: bool

    def call(self, command: Sequence[str], log: Path) -> None:
        """Run Python on one thread, with what it prints in a file, when a place is free."""
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if not self.gpu:
            environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        with self.places, log.open("w") as printed:
            ended = subprocess.run(
                [sys.executable, *command],
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        if ended.returncode:
            last = log.read_text().strip().splitlines()[-1:]
            raise UserError(f"{log}: {''.join(last)}")


@dataclass(frozen=True)
class Runs:
    """The runs of one variant."""

    plan: Plan
    name: str
    folder: Path
    runner: Runner
    taus: dict[float, float] = field(default_factory=dict)
    """Estimated tau of the first seed by rate."""

    @property
    def options(self) -> Options:
        return self.plan.options | self.plan.variants[self.name]

    def path(self, rate: float, seed: int) -> Path:
        return self.folder / f"{rate:.2g}-{seed}"

    def train(self, rate: float, seed: int) -> float:
        """Return the estimated tau of a run, which is made unless it is there."""
        out = self.path(rate, seed)
        if (tau := estimated(out)) is None:
            given = self.options | {"optim.lr": rate, "seed": seed, "out": str(out)}
            flags = [part for k, v in given.items() for part in (f"--{k}", text(v, seed))]
            command = ["-m", "draftsmith.train", self.plan.method, "--config", self.plan.config]
            log = out.with_name(out.name + ".log")
            self.runner.call([*command, *flags], log)
            if (tau := estimated(out)) is None:
                raise UserError(f"{log}: the run ended without an estimated tau")
        print(f"{self.name}: rate {rate:.2g}, seed {seed}: {tau:.3f}", file=sys.stderr)
        return tau

    def searched(self) -> float:
        """Return the rate with the highest estimated tau of the first seed."""
        optimizer = str(self.options.get("optim.optimizer", self.plan.optimizer))
        middle, seed = self.plan.rates[optimizer], self.plan.seeds[0]
        rates = {power: middle * 2.0**power for power in range(-FURTHEST, FURTHEST + 1)}
        taus: dict[int, float] = {}
        with ThreadPoolExecutor() as pool:
            found = pool.map(lambda power: self.train(rates[power], seed), (-1, 0, 1))
            taus.update(zip((-1, 0, 1), found, strict=True))
        best = max(taus, key=taus.__getitem__)
        while best and abs(best) < FURTHEST and best in (min(taus), max(taus)):
            following = best + (1 if best > 0 else -1)
            taus[following] = self.train(rates[following], seed)
            best = max(taus, key=taus.__getitem__)
        self.taus.update({rates[power]: tau for power, tau in sorted(taus.items())})
        return rates[best]

    def run(self) -> None:
        """Make all runs and their evaluation."""
        rate = self.searched()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda seed: self.train(rate, seed), self.plan.seeds[1:]))
        report = self.folder / "test.json"
        if not report.exists():
            drafters = [
                f"{self.path(rate, seed)}/best:name={tree}-{seed},{settings}"
                for seed in self.plan.seeds
                for tree, settings in self.plan.trees.items()
            ]
            flags = [part for drafter in drafters for part in ("--drafter", drafter)]
            decode = ["--target", self.plan.target, "--prompts", self.plan.prompts]
            decode += ["--max-new-tokens", str(self.plan.new_tokens), "--repeats", "1"]
            decode += ["--batch-size", str(self.plan.batch)]
            decode += ["--sampling.temperature", str(self.plan.temperature)]
            command = ["-m", "draftsmith", "evaluate", *decode, "--no-baselines", *flags]
            self.runner.call([*command, "--json", str(report)], self.folder / "test.log")
        searched = {f"{rate:.2g}": tau for rate, tau in self.taus.items()}
        (self.folder / "rate.json").write_text(json.dumps({"rate": rate, "searched": searched}))

    def measured(self, tree: str) -> list[float]:
        """Return tau of the test prompts, by seed; empty before they were decoded."""
        path = self.folder / "test.json"
        if not path.exists():
            return []
        drafters = read_report(str(path)).settings[0].drafters
        taus = [drafters[f"{tree}-{seed}"].tau_incl_bonus for seed in self.plan.seeds]
        known = [tau for tau in taus if tau is not None]
        return known if len(known) == len(taus) else []

    def rate(self) -> str:
        """Return the chosen rate, for the table."""
        path = self.folder / "rate.json"
        return f"{json.loads(path.read_text())['rate']:.2g}" if path.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", help="a variant; all if not given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at one time")
    parser.add_argument("--gpu", action="store_true", help="runs share the GPU")
    parser.add_argument("--table", action="store_true", help="print what is there, make no runs")
    given = parser.parse_args()
    try:
        plan = read_plan(given.plan)
        names = given.only or list(plan.variants)
        if unknown := sorted(set(names) - set(plan.variants)):
            known = ", ".join(plan.variants)
            raise UserError(f"{given.plan} has no variant {unknown[0]}; there are {known}")
        runner = Runner(BoundedSemaphore(given.jobs), given.gpu)
        variants = {name: Runs(plan, name, given.out / name, runner) for name in plan.variants}
        if not given.table:
            with ThreadPoolExecutor(len(names)) as pool:
                list(pool.map(Runs.run, [variants[name] for name in names]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(plan, variants)
    return 0


def read_plan(path: Path) -> Plan:
    """Return a plan; `UserError` for another file."""
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=Plan)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path} is not a plan of an ablation: {error}") from error


def estimated(run: Path) -> float | None:
    """Return the estimated tau at the end of a run; None for one that has not ended."""
    path = run / "metrics.jsonl"
    rows = path.read_text().splitlines() if path.exists() else []
    # The evaluation of the last step is the last thing that a run notes.
    return json.loads(rows[-1]).get("tau_estimated") if rows else None


def text(value: object, seed: int) -> str:
    """Return an option's value as a command line has it, with the seed in place of `{seed}`."""
    return str(value).lower() if isinstance(value, bool) else str(value).format(seed=seed)


def show(plan: Plan, runs: Mapping[str, Runs]) -> None:
    """Print the variants that were measured."""
    table = Table(box=None)
    columns = ["variant", "rate"]
    for tree in plan.trees:
        columns += [f"tau, {tree}", "over the first"]
    for column in columns:
        table.add_column(column)
    first = next(iter(runs.values()))
    for name, own in runs.items():
        row = [name, own.rate()]
        for tree in plan.trees:
            taus, reference = own.measured(tree), first.measured(tree)
            pairs = zip(taus, reference, strict=True) if taus and reference else ()
            ratios = [math.log(a / b) for a, b in pairs]
            row += [spread(taus)]
            row += [spread(ratios, exponential=True) if own is not first else ""]
        if row[2]:
            table.add_row(*row)
    Console(width=160 if not sys.stdout.isatty() else None).print(table, highlight=False)


def spread(values: Sequence[float], exponential: bool = False) -> str:
    """Return the mean of values and its 95% interval, or those of their exponentials."""
    if not values:
        return ""
    shown = math.exp if exponential else float
    centre = statistics.fmean(values)
    if len(values) == 1:
        return f"{shown(centre):.3f}"
    error = statistics.stdev(values) / len(values) ** 0.5
    reach = student_t(0.975, len(values) - 1) * error
    return f"{shown(centre):.3f} ({shown(centre - reach):.3f}-{shown(centre + reach):.3f})"


if __name__ == "__main__":
    sys.exit(main())
