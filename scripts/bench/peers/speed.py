"""Cost of a training step of EAGLE-3 by three libraries, whose steps take turns.

    ./scripts/bench/peers/environments.sh
    OMP_NUM_THREADS=1 python scripts/bench/peers/speed.py --lengths 512,1024,2048,4096

Hidden size 256, 8 heads, 4 KV heads, MLP 1024, vocabulary 8192, draft vocabulary 2048, seven
unrolled steps, one text of each length, float32, every token supervised. Each library is given the
same states of the same made-up target, makes the teacher's logits from them itself, and trains with
AdamW; 86 of 100 best tokens are in the draft vocabulary. Figures are of one thread: tokens per
CPU-second as the median of the steps, ratios as the median over turns, and the peak memory of a
step above what the process held before the first. Metrics are counted in every step, as SpecForge
does; draftsmith's own runs count them where a log is due, with `--metrics-every 10`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import peer_data
import torch
from peer_data import Document, Shape
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PEERS = Path(os.environ.get("DRAFTSMITH_PEERS", ROOT / ".peers"))
OPTIONS = {"speculators": ["--option", 'optimizer="adamw"']}
METRICS = "metrics_every"  # option of draftsmith's worker


@dataclass(frozen=True)
class Sizes:
    """Sizes of the made-up target and of the drafter."""

    hidden: int = 256
    vocab: int = 8192
    draft_vocab: int = 2048
    heads: int = 8
    kv_heads: int = 4
    mlp: int = 1024


EIGHT_B = Sizes(4096, 65536, 32000, 32, 8, 14336)
"""As Llama 3.1 8B, but for half of its vocabulary."""


def make_data(folder: Path, length: int, steps: int, sizes: Sizes) -> float:
    """Write a made-up target and one text of `length` tokens.

    Returns the share of positions whose best token is in the draft vocabulary.
    """
    torch.manual_seed(0)
    # Of this target only embedding, norm and head are used, and of its layers the number.
    config = LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=8, num_hidden_layers=3,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocab, max_position_embeddings=max(2048, 2 * length),
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    head = target.lm_head.weight.detach()
    head.normal_(std=2 * sizes.hidden**-0.5)  # logits of a standard deviation of about 2
    # Larger rows win more often, so that most best tokens are in the draft vocabulary.
    head[: sizes.draft_vocab] *= 1.25
    target.save_pretrained(folder / "target")
    raw = torch.randn(length, sizes.hidden)
    last = target.model.norm(raw).detach()
    inside = (last @ head.T).argmax(-1) < sizes.draft_vocab
    ids = torch.randint(0, sizes.vocab, (length,))
    taps = torch.randn(length, 3 * sizes.hidden)
    document = Document(ids, torch.ones_like(ids), taps, raw, last)
    drafter = (sizes.draft_vocab, sizes.heads, sizes.kv_heads, sizes.mlp)
    peer_data.write(folder, Shape((0, 1, 2), *drafter, steps, ((0,),)), [document])
    return float(inside.float().mean())


def python_of(library: str) -> str:
    """Return the interpreter of a library's own environment, if it has one, else this one."""
    own = PEERS / library / "bin/python"
    return str(own) if own.exists() else sys.executable


def missing(library: str) -> str | None:
    """Return why a peer cannot be run; None if it can."""
    if python_of(library) != sys.executable or importlib.util.find_spec(library) is not None:
        return None
    return f"no {PEERS / library}, and {library} is not installed here; run {HERE}/environments.sh"


class Worker:
    """One library's process, which takes a step when it is asked to."""

    def __init__(self, library: str, data: Path, metrics_every: int, *options: str) -> None:
        if library == "draftsmith":
            options = (*options, "--option", f"{METRICS}={metrics_every}")
        command = [python_of(library), str(HERE / "worker.py"), library, str(data), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._library, self._errors = library, data / f"{library}.log"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, *OPTIONS.get(library, [])], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        print("step", file=self._process.stdin, flush=True)
        return self._answer()

    def end(self) -> dict[str, float]:
        """Return the memory of the steps, and end the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        found = self._answer()
        self._process.wait()
        return found

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(
                f"{self._library}'s worker ended: {self._errors.read_text()[-2000:]}"
            )
        return json.loads(line)


def compare(
    data: Path, libraries: list[str], length: int, repeats: int, metrics_every: int, *options: str
) -> dict[str, dict[str, float]]:
    """Return the figures of each library, whose steps take turns; `options` are for `worker.py`."""
    workers = {library: Worker(library, data, metrics_every, *options) for library in libraries}
    times: dict[str, list[float]] = {library: [] for library in libraries}
    first: dict[str, float] = {}
    for turn in range(repeats + 2):
        for library, worker in workers.items():
            found = worker.step()
            first.setdefault(library, found["loss"])
            times[library] += [found["s"]] * (turn > 1)
    figures = {}
    for library, worker in workers.items():
        pairs = zip(times[library], times[libraries[0]], strict=True)
        memory = worker.end()
        figures[library] = {
            "tokens_per_s": length / statistics.median(times[library]),
            "ratio": statistics.median(theirs / ours for theirs, ours in pairs),
            "above_mib": memory["peak_mib"] - memory["resident_mib"],
            "first_loss": first[library],
            **memory,
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="512,1024,2048,4096")
    parser.add_argument("--repeats", type=int, default=12, help="turns that count")
    parser.add_argument("--steps", type=int, default=7, help="unrolled steps")
    parser.add_argument("--metrics-every", type=int, default=1, help="steps, of draftsmith")
    parser.add_argument("--libraries", default="draftsmith,speculators,specforge")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    libraries = arguments.libraries.split(",")
    for library in libraries:
        if library != "draftsmith" and (reason := missing(library)) is not None:
            print(f"error: {reason}", file=sys.stderr)
            raise SystemExit(2)
    table = Table(
        "tokens", "library", "tokens / CPU-s", "draftsmith is faster by", "peak MiB above"
    )
    found = {}
    for length in map(int, arguments.lengths.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            share = make_data(Path(folder), length, arguments.steps, Sizes())
            print(f"{length} tokens, best token in the draft vocabulary: {share:.0%}", flush=True)
            repeats = arguments.repeats if length < 2048 else max(3, arguments.repeats // 3)
            found[length] = compare(
                Path(folder), libraries, length, repeats, arguments.metrics_every
            )
        for library, row in found[length].items():
            speed, ratio = f"{row['tokens_per_s']:,.0f}", f"{row['ratio']:.2f}x"
            table.add_row(str(length), library, speed, ratio, f"{row['above_mib']:,.0f}")
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
