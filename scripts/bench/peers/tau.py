"""tau of EAGLE-3 drafters that three libraries trained on the same texts, by our decode loop.

    ./scripts/quickstart.sh                     # writes the texts; or only its steps 1 and 2
    ./scripts/bench/peers/environments.sh
    python scripts/bench/peers/tau.py --out runs/peers

Equal for all: the quickstart's target, texts, packed rows and tokens, one layer of the same sizes,
the whole vocabulary, one packed row a step in float32. Each library's own: objective, norms,
optimiser and schedule; of a few settings those count that have the highest tau at T = 0.8 on the
validation prompts with the first seed. draftsmith trains by its command, the others by `worker.py`
on the target's states from a file. tau is of the test prompts, with a tree of 16 nodes for all.
What is there already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import peer_data
import torch
from peer_data import Document, Shape
from rich.console import Console
from rich.table import Table
from speed import HERE, missing, python_of
from transformers import AutoModelForCausalLM

from draftsmith.command_line.parse import parse
from draftsmith.inference.targets.target import load_target
from draftsmith.train.data import tables
from draftsmith.train.data.batches import Batches
from draftsmith.train.methods.eagle.method import EagleRun

CONFIG = "configs/eagle/quickstart.yaml"
TREE = "length=5,width=8,nodes=16"
TEMPERATURES = (0, 0.8)
"""Greedy replies of so small a target are mostly loops, which flatter every drafter; at 0.8 its
texts were written."""


@dataclass(frozen=True)
class Settings:
    """Learning rate and options of one training."""

    rate: float
    options: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([f"{self.rate:g}", *(f"{k} {v}" for k, v in self.options.items())])


@dataclass(frozen=True)
class Recipe:
    """How one library trains, and the settings that are tried."""

    library: str
    tried: tuple[Settings, ...]
    imported: tuple[str, ...] = ()
    """Answers to what the checkpoint leaves open, for `draftsmith import`; taps as in `CONFIG`."""


PUBLISHED: dict[str, object] = {
    "objective.steps": 7,
    "objective.decay": 0.8,
    "objective.freeze_head": "false",
    "optim.optimizer": "adamw",
}
"""EAGLE-3's published objective and optimiser, with the quickstart's norms and schedule."""
NORMS: dict[str, object] = {"fc_norm": True}
RECIPES = {
    "draftsmith, quickstart": Recipe("draftsmith", (Settings(4e-3),)),
    "draftsmith, AdamW": Recipe(
        "draftsmith", tuple(Settings(rate, PUBLISHED) for rate in (1e-3, 2e-3, 4e-3))
    ),
    "draftsmith, Muon": Recipe(
        "draftsmith", (Settings(4e-3, PUBLISHED | {"optim.optimizer": "muon"}),)
    ),
    # 1e-3 is its default for both parts of its optimiser
    "speculators": Recipe("speculators", tuple(map(Settings, (1e-3, 2e-3, 4e-3, 8e-3)))),
    "SpecForge": Recipe(
        "specforge",
        (
            Settings(1e-4),  # its default rate
            Settings(1e-4, NORMS),
            Settings(4e-3),
            Settings(4e-3, NORMS),
            Settings(2e-3, NORMS),
            Settings(1e-3, NORMS),
        ),
        ("--taps", "[2,4,7]", "--norm-output", "false"),
    ),
}
CONSTANT = {"speculators": {"optimizer": "muon"}}
"""Options of every training of a library."""


@dataclass(frozen=True)
class Run:
    """One training."""

    name: str
    number: int
    """Of the settings that are tried."""
    seed: int

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.name]

    @property
    def settings(self) -> Settings:
        return self.recipe.tried[self.number]

    def folder(self, out: Path) -> Path:
        plain = "".join(c if c.isalnum() else "-" for c in self.name.lower())
        return out / f"{plain}-{self.number}-{self.seed}"


def make_data(folder: Path, run: EagleRun) -> None:
    """Write the states of the texts of `run`, in its packed rows, for `worker.py`."""
    target = load_target(run.target)
    table = tables.prepare(run.data, target, folder / "data", run.seed).train
    model = AutoModelForCausalLM.from_pretrained(run.target.path, dtype=torch.float32)
    caught: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, states: caught.append(states[0]))
    documents, rows, taps = [], [], tuple(run.heads.taps or ())
    packs = Batches(table, run.data.max_length, 1, 1, 1, run.seed)
    for pack in range(packs.packs):
        row = packs.documents_of_pack(pack)
        rows.append(tuple(range(len(documents), len(documents) + len(row))))
        for ids, written in row:
            tokens = torch.from_numpy(ids.astype(np.int64))
            caught.clear()
            with torch.no_grad():
                states = model.model(tokens[None], output_hidden_states=True).hidden_states
            tapped = torch.cat([states[tap][0] for tap in taps], dim=-1)
            mask = torch.from_numpy(written.astype(np.int64))
            documents.append(Document(tokens, mask, tapped, caught[0][0], states[-1][0]))
    config = model.config
    shape = Shape(
        taps, config.vocab_size, config.num_attention_heads, config.num_key_value_heads,
        config.intermediate_size, None, tuple(rows),
    )  # fmt: skip
    (folder / "target").symlink_to(Path(run.target.path).resolve())
    peer_data.write(folder, shape, documents)


def train(run: Run, out: Path, epochs: float) -> Path:
    """Train unless that is done; return the folder of the drafter that our loop decodes with."""
    folder, recipe = run.folder(out), run.recipe
    drafter = folder / "best" if recipe.library == "draftsmith" else folder / "drafter"
    done = folder / "done"  # `best` is there from the first evaluation on
    if done.exists():
        return drafter
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["ACCELERATE_USE_CPU"] = "true"
    if recipe.library == "draftsmith":
        command = [sys.executable, "-m", "draftsmith.train", "eagle", "--config", CONFIG]
        command += ["--out", str(folder), "--seed", str(run.seed), "--optim.lr"]
        command += [str(run.settings.rate)]
        for name, value in run.settings.options.items():
            command += [f"--{name}", str(value)]
        commands = [command]
    else:
        own = folder / "checkpoint"
        own.mkdir(parents=True, exist_ok=True)
        command = [python_of(recipe.library), str(HERE / "worker.py"), recipe.library]
        command += [str(out / "features"), "--out", str(own), "--seed", str(run.seed)]
        command += ["--epochs", str(epochs), "--lr", str(run.settings.rate)]
        for name, value in (CONSTANT.get(recipe.library, {}) | run.settings.options).items():
            command += ["--option", f"{name}={json.dumps(value)}"]
        found = ["--from", str(own), "--target", str(out / "features/target"), *recipe.imported]
        brought = ["draftsmith", "import", *found, "--out", str(drafter)]
        commands = [command, brought]
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{run.name} ({run.settings}), seed {run.seed}", flush=True)
    with (folder / "log.txt").open("a") as log:
        for command in commands:
            subprocess.run(command, check=True, env=environment, stdout=log, stderr=log)
    done.touch()
    return drafter


def measure(drafters: list[Path], prompts: str, out: Path) -> list[list[float]]:
    """Return the tau of each drafter at each of `TEMPERATURES`, in our decode loop."""
    command = ["draftsmith", "evaluate", "--target", "scripts/quickstart/target"]
    command += ["--no-baselines", "--prompts", prompts, "--max-new-tokens", "128"]
    command += ["--temperature", ",".join(map(str, TEMPERATURES)), "--json", str(out)]
    for drafter in drafters:
        command += ["--drafter", f"{drafter}:{TREE}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=environment)
    taus = []
    for setting in json.loads(out.read_text())["settings"]:
        # In the order in which they were given, after plain decoding.
        figures = list(setting["drafters"].values())[1:]
        assert len(figures) == len(drafters)
        taus.append([figure["tau_incl_bonus"] for figure in figures])
    return [list(of_one) for of_one in zip(*taus, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", default=";".join(RECIPES), help="names, with semicolons")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, a thread each")
    arguments = parser.parse_args()
    out, names = arguments.out, arguments.recipes.split(";")
    for library in {RECIPES[name].library for name in names} - {"draftsmith"}:
        if (reason := missing(library)) is not None:
            print(f"error: {reason}", file=sys.stderr)
            raise SystemExit(2)
    config = parse(EagleRun, ["--config", CONFIG], "tau.py")
    for source in config.data.sources:
        if not Path(source.path).exists():
            print(f"error: no {source.path}; run ./scripts/quickstart.sh first", file=sys.stderr)
            raise SystemExit(2)
    if not (out / "features/shape.json").exists():
        shutil.rmtree(out / "features", ignore_errors=True)  # of an interrupted call
        (out / "features").mkdir(parents=True)
        make_data(out / "features", config)
    with ThreadPoolExecutor(arguments.jobs) as pool:

        def trained(runs: list[Run]) -> list[Path]:
            return list(pool.map(lambda run: train(run, out, config.epochs), runs))

        best = dict.fromkeys(names, 0)
        choices = [name for name in names if len(RECIPES[name].tried) > 1]
        tried = [Run(name, i, 0) for name in choices for i in range(len(RECIPES[name].tried))]
        if tried:
            prompts = "runs/quickstart/valid.prompts.jsonl"
            taus = measure(trained(tried), prompts, out / "tried.json")
            by_tau = sorted(zip(taus, tried, strict=True), key=lambda x: x[0][1])
            for (greedy, sampled), run in by_tau:
                print(f"{run.name} ({run.settings}): validation tau {greedy:.3f}, {sampled:.3f}")
                best[run.name] = run.number  # the last of them is the highest
        runs = [Run(name, best[name], s) for name in names for s in range(arguments.seeds)]
        taus = measure(trained(runs), "runs/quickstart/test.prompts.jsonl", out / "taus.json")
    table = Table("recipe", "learning rate, options", *(f"tau at T = {t:g}" for t in TEMPERATURES))
    for name in names:
        own = [tau for tau, run in zip(taus, runs, strict=True) if run.name == name]
        cells = []
        for seeds in zip(*own, strict=True):
            each = " ".join(f"{tau:.2f}" for tau in seeds)
            cells.append(f"{statistics.median(seeds):.2f} ({each})")
        table.add_row(name, str(RECIPES[name].tried[best[name]]), *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
