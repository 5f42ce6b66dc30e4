"""Steps of a check: every command of the package on one target, a little of each."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from runner import TRAIN, Command, Step

from draftsmith.heads.exchange.engines import ENGINES
from draftsmith.heads.files import checksum
from draftsmith.train.outline import config_at

HERE = Path(__file__).parent
ENGINE_RANK = HERE.parent / "bench" / "engine_rank.py"
KINDS = {
    "medusa": "medusa",
    "eagle": "eagle3",
    "dflash": "dflash",
    "dspark": "dspark",
    "distill": "draft_model",
}
"""What engines' recipes call the drafters of each training command."""
ROW = 96  # tokens of a packed row
# elements of an output matrix of which Medusa gets no copies here: each needs 16 bytes an element
BIG_HEAD = 50_000_000
QUESTIONS = (
    "Name three animals that live in the sea.",
    "What is the capital of France, and what is it known for?",
    "Write a short poem about rain.",
    "Explain what a prime number is.",
    "How do I boil an egg?",
    "Write a Python function that adds two numbers.",
    "Give me two reasons to learn a language.",
    "What does a doctor do?",
    "List the days of the week.",
    "Why is the sky blue?",
    "Tell me about the city of Rome.",
    "How many legs does a spider have?",
)
HELD_OUT = (
    "Describe a tree in autumn.",
    "What is seven times eight?",
    "Write a letter to a friend.",
    "What is gravity?",
)


@dataclass
class Plan:
    """What is checked, and how much of it."""

    target: str
    folder: Path
    dtype: str
    tokens: int
    steps: int
    ranks: int
    quick: bool

    @property
    def methods(self) -> list[str]:
        return ["eagle"] if self.quick else list(KINDS)

    def at(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def its_target(self) -> list[str]:
        """Options that name the target to a command that decodes."""
        return ["--target", self.target, "--target.dtype", self.dtype]


def every_step(plan: Plan) -> list[Step]:
    """All steps, in order. Writes the prompts and the runs' configs. Raises `UserError` for a
    target that is not there."""
    config = config_at(plan.target).get_text_config()
    write_prompts(plan)
    for method in plan.methods:
        write_run(plan, method, config)
    return [
        *preparation(plan),
        *trainings(plan),
        *([] if plan.quick or plan.ranks == 1 else shared_trainings(plan)),
        *measurements(plan),
        *exports(plan),
    ]


def write_prompts(plan: Plan) -> None:
    """Questions as messages where the target has a chat template, as plain text otherwise."""
    files = ("tokenizer_config.json", "chat_template.jinja")
    folder = Path(plan.target)
    chat = not folder.is_dir() or any(
        "chat_template" in name + (folder / name).read_text()
        for name in files
        if (folder / name).is_file()
    )
    for name, texts in (("train", QUESTIONS), ("held_out", HELD_OUT)):
        rows = [
            {"messages": [{"role": "user", "content": t}]} if chat else {"text": t} for t in texts
        ]
        lines = "".join(json.dumps({"id": str(i), **row}) + "\n" for i, row in enumerate(rows))
        (plan.folder / f"{name}.prompts.jsonl").write_text(lines)


def write_run(plan: Plan, method: str, config: Any) -> None:
    """A run's config: the defaults of its method, but few steps and short rows."""
    vocabulary, layers = config.vocab_size, config.num_hidden_layers
    parts: dict[str, Any] = {}
    if method == "medusa":
        parts["heads"] = (
            {"shared_head": True}
            if vocabulary * config.hidden_size > BIG_HEAD
            else {"num_heads": 2}
        )
    if method in ("eagle", "dflash", "dspark") and layers < 8:  # too few for the default taps
        parts["heads"] = {"taps": [1] if layers < 4 else [1, layers // 2, layers - 1]}
    if method == "eagle" and plan.quick:
        parts["objective"] = {"steps": 2}
    if method in ("dflash", "dspark"):
        parts["heads"] = {"num_layers": 2, "block_size": 4, **parts.get("heads", {})}
        parts["objective"] = {"anchors": 16}
        if layers >= 8:
            parts["heads"]["taps"] = [2, layers // 2]
    run = {
        "out": plan.at(method),
        "target": {"path": plan.target, "dtype": plan.dtype},
        "data": {
            "sources": [
                {"path": plan.at("train.jsonl"), "name": "train"},
                {"path": plan.at("held_out.jsonl"), "name": "held out"},
            ],
            "held_out": {"by": "source", "sources": ["held out"]},
            "max_length": ROW,
            "max_lost_share": 0.9,  # a target may answer some questions with an end token alone
        },
        "rows_per_step": 1,
        "max_steps": plan.steps,
        "log_every": 1,
        "evaluation": {"every": 1000, "limit": 2, "max_new_tokens": plan.tokens, "tree_nodes": 8},
        # One is resumed from; of a large target each takes gigabytes.
        "checkpoints": {"every": 1 if method == "eagle" else 1000, "keep": 1},
        **parts,
    }
    (plan.folder / f"{method}.yaml").write_text(yaml.safe_dump(run, sort_keys=False))


def preparation(plan: Plan) -> list[Step]:
    """Machine and target, plain decoding, data."""
    generate = [
        "generate",
        *plan.its_target,
        "--prompt",
        "What is the capital of France?",
        "--max-new-tokens",
        str(plan.tokens),
    ]
    regenerate = [
        "data",
        "regenerate",
        *plan.its_target,
        "--max-new-tokens",
        str(max(plan.tokens, 24)),
    ]
    sets = [
        ["--data", plan.at(f"{name}.prompts.jsonl"), "--out", plan.at(f"{name}.jsonl")]
        for name in ("train", "held_out")
    ]
    runs = [
        ["data", "plan", "--method", m, "--config", plan.at(f"{m}.yaml"), "--tokens", "1e8"]
        for m in plan.methods
    ]
    first = plan.methods[0] if plan.quick else "eagle"
    store = [
        "data",
        "extract",
        "--method",
        first,
        "--config",
        plan.at(f"{first}.yaml"),
        "--out",
        plan.at("store"),
    ]
    return [
        Step("doctor", [Command(["doctor", "--target", plan.target, "--dtype", plan.dtype])]),
        Step(
            "generate",
            [Command(generate), Command([*generate, "--drafter", "ngram", "--temperature", "1"])],
            needs=["doctor"],
        ),
        Step(
            "data regenerate",
            [Command([*regenerate, *options]) for options in sets],
            needs=["doctor"],
        ),
        Step("data plan", [Command(run) for run in runs]),
        Step("data extract", [Command(store)], needs=["data regenerate"]),
    ]


def trainings(plan: Plan) -> list[Step]:
    """Every method for a few steps in one process; from a store; stopped and resumed."""
    steps = [
        Step(
            f"train {m}",
            [Command([m, "--config", plan.at(f"{m}.yaml")], TRAIN)],
            losses(plan, m),
            ["data regenerate"],
        )
        for m in plan.methods
    ]
    run = ["eagle", "--config", plan.at("eagle.yaml")]
    from_store = [*run, "--features.store", plan.at("store"), "--out", plan.at("eagle_store")]
    steps.append(
        Step(
            "train eagle from a store",
            [Command(from_store, TRAIN)],
            losses(plan, "eagle_store"),
            ["data extract"],
        )
    )
    resumed = [*run, "--out", plan.at("eagle_resumed")]
    steps.append(
        Step(
            "resume after SIGTERM",
            after=lambda log: stop_and_resume(plan, resumed, log),
            needs=["train eagle"],
        )
    )
    return steps


def losses(plan: Plan, output: str) -> Callable[[Path], str]:
    """First and last loss of a run, both finite."""

    def look(_log: Path) -> str:
        lines = (plan.folder / output / "metrics.jsonl").read_text().splitlines()
        found = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
        assert len(found) == plan.steps, f"{len(found)} losses in metrics.jsonl, not {plan.steps}"
        assert all(loss is not None and abs(loss) < 1e6 for loss in found), f"losses are {found}"
        for state in (plan.folder / output).glob("checkpoints/*/state"):
            # the optimiser's: of a large target gigabytes, and nothing goes on from it
            shutil.rmtree(state)
        return f"loss {found[0]:.2f} to {found[-1]:.2f}"

    return look


def stop_and_resume(plan: Plan, arguments: Sequence[str], log: Path) -> str:
    """Tell a run to stop after its first step, start it again, and compare the weights with those
    of the run that went on."""
    metrics = plan.folder / "eagle_resumed" / "metrics.jsonl"
    command = [sys.executable, "-m", "draftsmith.train", *arguments]
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}  # and SIGTERM after the first step\n")
        first = subprocess.Popen(command, stdout=file, stderr=file)
        while first.poll() is None and not metrics.is_file():
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 143, f"asked to stop, it ended with exit code {first.returncode}"
        stopped = sorted((plan.folder / "eagle_resumed" / "checkpoints").glob("step-*"))[-1].name
        assert subprocess.run(command, stdout=file, stderr=file).returncode == 0, (
            "the same command did not go on"
        )
    last = f"checkpoints/step-{plan.steps:06d}/drafter/model.safetensors"
    same = checksum(plan.folder / "eagle" / last) == checksum(plan.folder / "eagle_resumed" / last)
    assert same, f"stopped at {stopped} and resumed, it ends with other weights"
    shutil.rmtree(plan.folder / "eagle_resumed")
    return f"stopped at {stopped}, then the same bits"


def shared_trainings(plan: Plan) -> list[Step]:
    """Several processes: a copy each, FSDP2, DeepSpeed ZeRO-3."""
    run = ["--config", plan.at("eagle.yaml"), "--rows-per-step", str(plan.ranks), "--out"]
    launch = [
        "accelerate",
        "launch",
        "--multi_gpu",
        "--num_processes",
        str(plan.ranks),
        "--num_machines",
        "1",
    ]
    launch += [
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--num_cpu_threads_per_process",
        "1",
    ]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(plan.ranks),
    ]
    cpu = ["env", "ACCELERATE_USE_CPU=true", "OMP_NUM_THREADS=1"]
    found = []
    for name, program in (
        ("ddp", [*cpu, *launch, "-m", "draftsmith.train", "eagle"]),
        ("fsdp2", ["env", "OMP_NUM_THREADS=1", *torchrun, str(ENGINE_RANK), "fsdp2", "eagle"]),
        ("zero3", ["env", "OMP_NUM_THREADS=1", *torchrun, str(ENGINE_RANK), "zero3", "eagle"]),
    ):
        output = f"eagle_{name}"
        # DeepSpeed does not keep matrices whole, which Muon needs.
        optimizer = ["--optim.optimizer", "adamw"] if name == "zero3" else []
        command = Command([*run, plan.at(output), *optimizer], program)
        found.append(
            Step(
                f"train eagle, {plan.ranks} ranks, {name}",
                [command],
                losses(plan, output),
                ["train eagle"],
            )
        )
    return found


def measurements(plan: Plan) -> list[Step]:
    """Every drafter and baseline, losslessness, tuning, simulation, the report."""
    drafters = [option for m in plan.methods for option in ("--drafter", plan.at(f"{m}/best"))]
    prompts = ["--prompts", plan.at("held_out.prompts.jsonl")]
    short = ["--max-new-tokens", str(plan.tokens)]
    settings = ["--temperature", "0,1", "--batch-size", "1,4", "--repeats", "1"]
    report, profile = plan.at("evaluation.json"), plan.at("profile.json")
    trained = [f"train {m}" for m in plan.methods]
    evaluate = ["evaluate", *plan.its_target, *drafters, *prompts, *short]
    one = ["--drafter", plan.at("eagle/best")]
    tune = [
        "tune",
        *plan.its_target,
        *one,
        *prompts,
        *short,
        "--limit",
        "2",
        "--repeats",
        "1",
        "--finalists",
        "1",
        "--samples",
        "4",
    ]
    # One by one they are held against plain decoding by evaluate; here in a batch, against requests
    # that were alone.
    exact = [
        "--target",
        plan.target,
        "--dtype",
        plan.dtype,
        *drafters,
        *prompts,
        *short,
        "--batch-sizes",
        "4",
    ]
    served = ["--target", plan.target, "--dtype", plan.dtype, *drafters, *prompts, *short]
    return [
        Step(
            "evaluate",
            [Command([*evaluate, *settings, "--json", report])],
            lambda _: identical(Path(report)),
            trained,
        ),
        Step(
            "exactness",
            [Command(exact, [sys.executable, str(HERE / "exactness.py")])],
            exact_lines,
            trained,
        ),
        Step(
            "a server, and transformers",
            [Command(served, [sys.executable, str(HERE / "serving.py")])],
            exact_lines,
            trained,
        ),
        Step(
            "tune, and decode with its profile",
            [
                Command([*tune, "--contexts", "64", "--out", profile]),
                Command(
                    [
                        "generate",
                        *plan.its_target,
                        *one,
                        "--profile",
                        profile,
                        "--prompt",
                        "Hello!",
                        *short,
                    ]
                ),
            ],
            needs=["train eagle"],
        ),
        Step("simulate", [Command(["simulate", "--acceptance", report])], needs=["evaluate"]),
        Step(
            "report",
            [Command(["report", report, plan.at("eagle"), "--out", plan.at("report.html")])],
            needs=["evaluate"],
        ),
    ]


def identical(report: Path) -> str:
    """Every reply that must equal plain decoding's does, but for near ties of the target."""
    equal = comparable = 0
    found = json.loads(report.read_text())
    exact = found["dtype"] in ("float32", "float64")
    for setting in found["settings"]:
        for name, drafter in setting["drafters"].items():
            for request in drafter["per_request"]:
                comparable += request["equal_to_ar"] is not None
                equal += bool(request["equal_to_ar"])
                gap = request["top2_gap"]
                tied = gap < (1e-3 if exact else 0.5) if gap is not None else not exact
                assert request["equal_to_ar"] in (True, None) or tied, (
                    f"{name} differs from plain decoding in {request['id']}"
                )
    return f"{equal} of {comparable} replies identical"


def exact_lines(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if line.endswith(" equal")]
    counts = [line.rpartition(": ")[2].split(" of ") for line in lines]
    equal, total = (
        sum(int(a) for a, _ in counts),
        sum(int(b.removesuffix(" equal")) for _, b in counts),
    )
    return f"{equal} of {total} replies equal plain decoding's or generate's, {len(lines)} ways"


def exports(plan: Plan) -> list[Step]:
    """Every engine that takes the method; our own export read back, and decoding with it."""
    found = []
    for method in plan.methods:
        engines = [name for name, engine in ENGINES.items() if KINDS[method] in engine.recipes][
            : 2
            if plan.quick
            else None  # vLLM does not take heads that share the target's
        ]
        commands = [
            Command(
                [
                    "export",
                    "--drafter",
                    plan.at(f"{method}/best"),
                    "--to",
                    engine,
                    "--out",
                    plan.at(f"exports/{KINDS[method]}-{engine}"),
                ],
                may_refuse=True,
            )
            for engine in engines
        ]

        def wrote(_, m=method, e=engines):
            return exported(plan, m, e)

        found.append(Step(f"export {method}", commands, wrote, [f"train {method}"]))
    back, prompt = (
        plan.at("imported"),
        ["--prompt", "What is gravity?", "--max-new-tokens", str(plan.tokens)],
    )
    read_back = [
        "import",
        "--from",
        plan.at("exports/eagle3-vllm"),
        "--target",
        plan.target,
        "--out",
        back,
    ]
    commands = [
        Command(read_back),
        Command(["generate", *plan.its_target, "--drafter", back, *prompt]),
    ]
    return [*found, Step("import our export, and decode", commands, needs=["export eagle"])]


def exported(plan: Plan, method: str, engines: Sequence[str]) -> str:
    """Which engines' folders were written; at least one of them."""
    there = [
        engine
        for engine in engines
        if (plan.folder / "exports" / f"{KINDS[method]}-{engine}" / "README.md").is_file()
    ]
    assert there, "no engine takes it"
    for engine in there[1:]:  # what was read back once is not needed again, and large
        shutil.rmtree(plan.folder / "exports" / f"{KINDS[method]}-{engine}")
    return ", ".join(there)
