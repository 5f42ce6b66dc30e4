"""Stages of the GPU benchmark (`gpu.py`), each a function of a report, a device and `tiny`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_report import Report
from random_models import (
    packed_rows,
    random_drafter,
    random_features,
    random_target,
    training_operations,
    training_step,
)
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from draftsmith.inference.base.settings import GREEDY, Sampling, TargetConfig
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import Generation, Request, decode, generate
from draftsmith.inference.evaluation.measure import first_difference
from draftsmith.inference.proposers.contract import Accepted, Prompts, Proposer, StaticProposer
from draftsmith.inference.proposers.dflash import DFlashProposer
from draftsmith.inference.proposers.eagle import EagleProposer
from draftsmith.inference.proposers.medusa import MedusaProposer
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.recorded import POOLS
from draftsmith.inference.rounds.cache import TreeCache
from draftsmith.inference.rounds.device import prepare
from draftsmith.inference.rounds.sampling import Draws
from draftsmith.inference.rounds.tree import DraftTree
from draftsmith.inference.targets.target import Target, load_for_decoding

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "scripts" / "quickstart"
ACCEPTED = 3  # drafts that a round accepts in the replay of a known text
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
ATTENTION = ("flash", "fmha", "attention", "flex", "sdpa")
GPU_TESTS = (  # named, since other files need packages that a bare machine lacks
    "tests/train/test_memory.py",
    "tests/train/methods/test_blocks.py",
    "tests/train/methods/test_unroll.py",
    "tests/exact/test_greedy_equality.py",
)


def synchronise(device: torch.device) -> float:
    """Wait for the device; return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def median_ms(device: torch.device, work: Callable[[], Any], repeats: int, warm: int = 2) -> float:
    times = []
    for turn in range(warm + repeats):
        start = synchronise(device)
        work()
        if turn >= warm:
            times.append(1000 * (synchronise(device) - start))
    return statistics.median(times)


def copy_speed(device: torch.device, tiny: bool) -> float:
    """Return bytes per second, read and written, of a large copy on the device."""
    size = 1 << (22 if tiny else 31)
    source, goal = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / (median_ms(device, lambda: goal.copy_(source), 10) / 1000)


def product_speed(device: torch.device, tiny: bool) -> float:
    """Return FLOP/s of a large product of bfloat16 matrices."""
    size = 256 if tiny else 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (median_ms(device, lambda: a @ b, 10) / 1000)


def machine(report: Report, device: torch.device, tiny: bool) -> None:
    """Note the machine, and its speed at best."""
    report.figure("torch, transformers", f"{torch.__version__}, {transformers.__version__}")
    report.figure("bf16 product, TFLOP/s", product_speed(device, tiny) / 1e12, "H100: 600 to 800")
    report.figure("copy, TB/s", copy_speed(device, tiny) / 1e12, "H100: 3.0, H200: 4.3")
    lengths = [1000 + i for i in range(8 if tiny else 24)]
    for cudnn in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        name = f"attention, ms a call, new length each time, cuDNN {'on' if cudnn else 'off'}"
        expected = "on: 20 to 40 if it plans" if cudnn else "below 0.2"
        report.figure(name, growing_attention(device, lengths), expected)
    if device.type == "cuda":
        report.figure("GPU", torch.cuda.get_device_name())
        report.figure("cuDNN", torch.backends.cudnn.version())


def growing_attention(device: torch.device, lengths: list[int]) -> float:
    """Return the median milliseconds of a call of attention over keys of ever new lengths."""
    queries = torch.randn(1, 8, 64, 128, device=device, dtype=torch.bfloat16)
    keys = torch.randn(1, 8, max(lengths) + 1, 128, device=device, dtype=torch.bfloat16)
    times = []
    for length in lengths:
        wide = -(-length // 16) * 16  # rows of a mask are aligned, as in decoding
        mask = queries.new_zeros(1, 1, 64, wide)[..., :length]
        start = synchronise(device)
        torch.nn.functional.scaled_dot_product_attention(
            queries, keys[:, :, :length], keys[:, :, :length], attn_mask=mask
        )
        times.append(1000 * (synchronise(device) - start))
    return statistics.median(times)


def tests(report: Report, device: torch.device, _tiny: bool) -> None:
    """The tests that want a GPU."""
    if missing := [name for name in ("pytest", "hypothesis", "peft") if find_spec(name) is None]:
        report.figure("tests", f"not run: install {', '.join(missing)}")
        return
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
    command += GPU_TESTS
    if device.type != "cuda":
        command.append("--collect-only")
    elif find_spec("xdist") is not None:  # most of their time is compilation on the CPU
        command += ["-n", "4"]
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as ran:
        assert ran.stdout is not None
        for line in filter(None, map(str.rstrip, ran.stdout)):
            print(f"  {line}", flush=True)  # what has passed is known where this stage is cut off
            lines.append(line)
            if line.startswith(("FAILED", "ERROR")):
                report.check(line[:200], False)
    report.check("pytest -m gpu", ran.returncode == 0, lines[-1] if lines else "no output")


def exactness(report: Report, device: torch.device, tiny: bool) -> None:
    """In float32 every drafter writes on the device what plain decoding writes on the CPU."""
    texts = [
        "def read(path):\n",
        "class Stack:\n    def __init__(self",
        "import os\n\n",
        "def add(",
    ]
    texts = texts[: 1 if tiny else 4]
    targets = []
    for name in ("cpu", device.type):
        config = TargetConfig(str(QUICKSTART / "target"), dtype="float32", device=name)
        targets.append(load_for_decoding(config))
    here, there = targets
    requests = [Request(here.tokenizer(text)["input_ids"], i) for i, text in enumerate(texts)]
    drafters = sorted((QUICKSTART / "drafters").iterdir())[: 1 if tiny else None]
    specs = ["none", "ngram", str(QUICKSTART / "draft_model"), *map(str, drafters)]
    rules: dict[str, Sampling] = {
        "greedy": Sampling(),
        "coupled": Sampling(temperature=0.8, seed=3),
    }
    for rule, sampling in rules.items():
        plain = generate(here, PlainDecoding(), requests, 48, sampling)
        wanted = [reply.token_ids for reply in plain]
        for spec in specs:
            for compiled in (False, True) if device.type == "cuda" else (False,):
                name = f"{Path(spec).name}, {rule}{', one graph' if compiled else ''}"
                with noted(report, name):
                    there.static = compiled
                    proposer = load_proposer(spec, there, print)
                    found = [r.token_ids for r in generate(there, proposer, requests, 48, sampling)]
                    same = sum(a == b for a, b in zip(found, wanted, strict=True))
                    detail = f"{same} of {len(wanted)} texts equal the CPU's"
                    report.check(name, same == len(wanted), detail)


class Replayed(StaticProposer):
    """Proposer that drafts as `inner` does, and then puts a known text on one path of its tree.

    With random weights no draft would be accepted, and moving accepted paths would never be timed.
    """

    def __init__(self, inner: StaticProposer, text: Tensor) -> None:
        """`text` `[T]` holds the tokens of prompt and reply, on the device."""
        self.inner, self.text = inner, text
        self.name, self.taps, self.max_drafted = inner.name, inner.taps, inner.max_drafted
        self.traceable = inner.traceable
        assert not inner.left_for_commit, "its names are looked up here"

    @property
    def own_cache(self) -> TreeCache | None:
        return self.inner.own_cache

    @property
    def round_key(self) -> tuple[Hashable, ...]:
        return self.inner.round_key

    @property
    def weight_bytes(self) -> int:
        return self.inner.weight_bytes

    def prefill(self, prompts: Prompts) -> None:
        self.inner.prefill(prompts)

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        tree = self.inner.propose(root, draws)
        # The deepest path: its first nodes get the tokens that the target is about to choose.
        leaf = tree.tables.depths.argmax(-1)
        rows = torch.arange(len(leaf), device=leaf.device)
        path = tree.tables.paths[rows, leaf][:, 1 : ACCEPTED + 1]
        path = path.clamp(min=0).expand(len(root), -1)
        ahead = torch.arange(1, path.shape[1] + 1, device=leaf.device)
        places = (draws.lengths[:, None] + ahead).clamp(max=len(self.text) - 1)
        drafts = tree.tokens.scatter(1, path, self.text[places])[:, 1:]
        # A shallow tree's path ends in the root's slot, and the root is not a draft.
        tree.tokens = torch.cat((tree.tokens[:, :1], drafts), 1)
        return tree

    def commit(self, accepted: Accepted) -> None:
        self.inner.commit(accepted)

    def keep(self, rows: list[int]) -> None:
        self.inner.keep(rows)

    def finish(self) -> None:
        self.inner.finish()


def ready_drafter(method: str, target: Target, **settings: Any) -> Any:
    """Return a random drafter for decoding.

    EAGLE's logits are scaled so that its best tokens have probabilities as after training, which
    makes trees as deep.
    """
    drafter = random_drafter(method, target, **settings).to(target.dtype)
    drafter.eval().requires_grad_(False)
    if method == "eagle":
        drafter.norm.weight.fill_(5 / float(drafter.lm_head.weight[0].norm()))
    return drafter


def ways(target: Target, tiny: bool) -> Iterator[tuple[str, Callable[[], StaticProposer]]]:
    """Yield the names of ways to decode, and what makes their proposers."""
    drafter = partial(ready_drafter, target=target)
    nodes = 8 if tiny else 60
    tree = TreeSettings(length=4 if tiny else 7, width=3 if tiny else 10, nodes=nodes)
    yield "plain", PlainDecoding
    yield f"eagle, {nodes} nodes", lambda: EagleProposer(drafter("eagle"), tree)
    yield (
        "eagle, chain of 4",
        lambda: EagleProposer(drafter("eagle"), TreeSettings(length=4, width=1)),
    )
    layers = 2 if tiny else 5
    yield (
        "dflash, chain",
        lambda: DFlashProposer(drafter("dflash", num_layers=layers, block_size=8 if tiny else 16)),
    )
    yield (
        "medusa, 26 nodes",
        lambda: MedusaProposer(drafter("medusa"), TreeSettings(nodes=8 if tiny else 25)),
    )


def eager(report: Report, device: torch.device, tiny: bool) -> None:
    """Rounds as they are, at 8B shape, batch 1."""
    target, floor = target_of_rounds(report, device, tiny)
    text = Known(target, 32 if tiny else 512, 24 if tiny else 64)
    for name, make in ways(target, tiny):
        with noted(report, name):
            decoded(report, name, measured(device, target, make(), text, floor))


def graph(
    report: Report,
    device: torch.device,
    tiny: bool,
    nodes: tuple[int, ...] = (8,),
    contexts: tuple[int, ...] = (32,),
) -> None:
    """Rounds as one CUDA graph each, over trees of `nodes` and `contexts`, plain decoding first."""
    target, floor = target_of_rounds(report, device, tiny)
    target.static = device.type == "cuda"
    drafter = ready_drafter("eagle", target)
    for context in contexts:
        text, plain = Known(target, context, 24 if tiny else 48), 0.0
        for count in (1, *nodes):
            name = f"context {context}, {f'{count} nodes' if count > 1 else 'plain'}"
            with noted(report, name):
                proposer: StaticProposer = PlainDecoding()
                if count > 1:
                    settings = TreeSettings(length=4 if tiny else 7, width=3 if tiny else 10)
                    proposer = EagleProposer(drafter, replace(settings, nodes=count))
                row = measured(device, target, proposer, text, floor)
                plain = plain or row["round ms"]
                row["times plain"] = row["tau"] * plain / row["round ms"]
                decoded(report, name, row)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    POOLS.clear()
    for name, make in islice(ways(target, tiny), 2, None):
        with noted(report, name):
            text = Known(target, contexts[0], 24 if tiny else 48)
            decoded(report, name, measured(device, target, make(), text, floor))


def target_of_rounds(report: Report, device: torch.device, tiny: bool) -> tuple[Target, float]:
    """Return a fused random target, and the milliseconds in which its weights can be read once."""
    target = random_target("tiny" if tiny else "qwen3-8b", device, torch.bfloat16)
    count_up(target)
    prepare(device)
    target.fuse(move=True)
    report.check("the fused forward pass is used", target.fused is not None)
    if device.type == "cuda":
        kernels = target.fused is not None and target.fused.takes_trees
        report.check("the kernels for trees are used", kernels)
    parts = (target.decoder.layers, target.model.lm_head)
    weights = sum(p.nbytes for part in parts for p in part.parameters())
    floor = 1000 * weights / copy_speed(device, tiny)
    report.figure("ms to read the weights once", floor, "8B: 5 on an H100, 3.6 on an H200")
    return target, floor


def count_up(target: Target) -> None:
    """Let the target write, after each token, the one with the next id, by far.

    With weights that are all random the best logits are nearly equal. In bfloat16 every way to
    decode writes another text then, and none of the known text is accepted.
    """
    embedding = target.model.get_input_embeddings().weight.data
    embedding.normal_(0, 20)  # above what all layers add
    target.model.lm_head.weight.data.copy_(embedding.roll(1, 0)).mul_(1e-3)


class Known:
    """A prompt and the text that plain decoding writes after it."""

    def __init__(self, target: Target, context: int, count: int) -> None:
        self.target, self.count = target, count
        self.prompt = [5 + i % 400 for i in range(context)]
        compiled, target.static = target.static, False
        self.plain = once(target, PlainDecoding(), self.prompt, count)
        target.static = compiled
        self.tokens = torch.tensor([*self.prompt, *self.plain.token_ids], device=target.device)
        self.other: Generation | None = None

    def remark(self) -> str:
        """Return whether the last text is plain decoding's; else by how near a tie it differs."""
        if self.other is None or self.other.token_ids == self.plain.token_ids:
            return "equal"
        index, gap = first_difference(self.target, self.plain, self.other, GREEDY)
        return f"other from token {index} on, the two best logits {gap} apart"


def decoded(report: Report, name: str, row: dict[str, Any]) -> None:
    """Note the rounds of a way to decode, and whether its text is plain decoding's."""
    report.figure(name, row)
    report.check(f"{name}: the text of plain decoding", row["text"] == "equal", row["text"])


def measured(
    device: torch.device, target: Target, proposer: StaticProposer, text: Known, floor: float
) -> dict[str, Any]:
    """Return medians of the rounds of a proposer whose drafts are partly replaced by `text`."""
    if not isinstance(proposer, PlainDecoding):
        proposer = Replayed(proposer, text.tokens)
    start = synchronise(device)
    once(target, proposer, text.prompt, text.count)
    first = synchronise(device) - start
    text.other = once(target, proposer, text.prompt, text.count)
    row: dict[str, Any] = summary(text.other)
    row["text"] = text.remark()
    row["times the floor"] = row["round ms"] / floor
    row["first call s"] = first
    return row | launched(device, target, proposer, text.prompt, text.count, row["round ms"])


def once(target: Target, proposer: Proposer, prompt: list[int], count: int) -> Generation:
    return generate(target, proposer, [prompt], count, eos_ids=frozenset())[0]


def summary(found: Generation) -> dict[str, float]:
    """Medians over rounds, without the first three."""
    later = found.rounds[3:]
    row = {
        "tau": sum(len(r.tokens) for r in later) / len(later),
        "round ms": 1000 * statistics.median(r.t_round_s for r in later),
    }
    for part in ("draft", "verify", "accept", "kv"):
        row[f"{part} ms"] = 1000 * statistics.median(getattr(r, f"t_{part}_s") for r in later)
    return row


def launched(
    device: torch.device,
    target: Target,
    proposer: Proposer,
    prompt: list[int],
    count: int,
    round_ms: float,
) -> dict[str, Any]:
    """Return kernels, launches by the host and the share of time without a kernel, of a round."""
    if device.type != "cuda":
        return {}
    steps = decode(target, proposer, [Request(prompt)], count, eos_ids=frozenset())
    for _ in range(4):
        next(steps)
    watched = 6
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(watched):
            next(steps)
        torch.cuda.synchronize()
    steps.close()
    events: Any = seen.events()
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    host = Counter(e.name for e in events if e.name in (*LAUNCHES, "cudaGraphLaunch"))
    busy = sum(e.device_time for e in kernels) / 1000 / watched
    longest = Counter[str]()
    for kernel in kernels:
        longest[kernel.name.split("<")[0].split("(")[0][-40:]] += kernel.device_time
    return {
        "longest kernels, us": {name: round(us / watched) for name, us in longest.most_common(10)},
        "kernels": len(kernels) / watched,
        "launches": sum(host[name] for name in LAUNCHES) / watched,
        "graphs": host["cudaGraphLaunch"] / watched,
        "idle share": 1 - busy / round_ms,
    }


def training(report: Report, device: torch.device, tiny: bool) -> None:
    """Steps of drafters of 8B shape on random features."""
    target = random_target("tiny" if tiny else "qwen3-8b", device, torch.bfloat16, layers=8)
    prepare(device)
    peak = product_speed(device, tiny)
    flex = device.type == "cuda"  # it has no gradients on a CPU
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("eagle", 2048, {"attention": "sdpa"}),
        ("eagle", 8192, {"attention": "sdpa"}),
        *([("eagle", 8192, {"attention": "flex"})] if flex else []),
        ("eagle", 8192, {"recompute": True}),
        ("dflash", 4096, {}),
        ("dspark", 4096, {}),
        ("medusa", 4096, {}),
    ]
    for method, length, options in cases:
        length = length // 16 if tiny else length
        label = ", ".join([method, f"S = {length}", *(f"{k} {v}" for k, v in options.items())])
        with noted(report, label):
            settings = {"num_layers": 2, "block_size": 8} if method in ("dflash", "dspark") else {}
            drafter = random_drafter(method, target, **settings)
            batch = packed_rows(1, length, target.vocab_size - 1, 96 if tiny else 2048)
            taps = drafter.taps
            features = random_features(target, batch, taps)
            step = training_step(
                method, target, drafter, lambda f=features: f, batch, bf16=True, **options
            )
            operations = training_operations(method, target, drafter, batch)
            report.figure(label, cost(device, step, length, operations / peak))
            del drafter, features, step
        if device.type == "cuda":
            torch.cuda.empty_cache()


def peers(report: Report, device: torch.device, tiny: bool) -> None:
    """speculators' training step of EAGLE-3 and ours, alternating on the same features."""
    from speed import EIGHT_B, Sizes, compare, make_data, missing

    libraries = ["draftsmith", "speculators"]
    if (reason := missing("speculators")) is not None:
        report.figure("speculators", reason)
        libraries.remove("speculators")
    length, repeats = (64, 2) if tiny else (2048, 8)
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder), length, 7, Sizes() if tiny else EIGHT_B)
        options = ("--device", device.type, "--bf16")
        found = compare(Path(folder), libraries, length, repeats, 1, *options)
    for library, row in found.items():
        report.figure(f"{library}, S = {length}", row)


@contextmanager
def noted(report: Report, name: str) -> Iterator[None]:
    """Note an error as a failed check, and go on, unless the device itself is lost."""
    try:
        yield
    except Exception as error:
        report.check(name, False, str(error).splitlines()[0][:200])
        if "CUDA error" in str(error):
            raise


def cost(
    device: torch.device, step: Callable[[], Tensor], length: int, share_of_second: float
) -> dict[str, Any]:
    """Return time, memory and kernels of a training step over `length` tokens.

    Its operations take `share_of_second` at the GPU's peak.
    """
    loss = step()
    cuda = device.type == "cuda"
    resident = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    ms = median_ms(device, step, 5 if cuda else 1, 1)
    row: dict[str, Any] = {
        "ms": ms,
        "tokens/s": length / ms * 1000,
        "share of peak": share_of_second / (ms / 1000),
        "loss": float(loss),
    }
    if cuda:
        row["GiB above resident"] = (torch.cuda.max_memory_allocated() - resident) / 2**30
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        row["attention"] = " ".join(sorted(attention_kernels(seen)))
    return row


def attention_kernels(seen: Any) -> set[str]:
    """Return the names of the kernels of attention that ran, shortened."""
    names = {event.name for event in seen.events() if event.name is not None}
    found = {name for name in names if any(part in name.lower() for part in ATTENTION)}
    return {name.split("<")[0].split("(")[0][-60:] for name in found} or {"none by name"}
