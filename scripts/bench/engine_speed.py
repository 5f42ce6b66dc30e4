"""Speed of an engine with and without a drafter on this machine: servers measured alternately.

    python scripts/bench/engine_speed.py --engine llamacpp \
        --python "$(scripts/llamacpp/environment.sh)" --target models/smollm2-135m-instruct \
        --drafter runs/smollm2/eagle/best --drafts 2,3 --concurrency 1 \
        --prompts runs/smollm2/test.prompts.jsonl --limit 16

The drafter is exported, one server without it and one for each number of drafts are started, and
`draftsmith evaluate --server` measures each of them in every turn, greedy. Figures are medians of
the turns: tau is of all decoding steps, tokens per second of all requests with their prompts,
milliseconds of a later token of one request, and a round in plain steps, which is tau times the
drafter's milliseconds over plain decoding's. A server takes at most eight requests at once.

`--passes 1,2,4,8` also prints what a pass over so many tokens takes in llama.cpp, by its own clock:
prompts of so many random tokens. The output matrix is multiplied for the last one only, so that
verifying as many takes longer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import torch
from engine_counts import CPU, exported, run
from rich.console import Console
from rich.table import Table

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.evaluation.evaluate import measured
from draftsmith.inference.evaluation.options import EvaluateOptions
from draftsmith.inference.evaluation.results import ServerFigures
from draftsmith.inference.targets.target import load_for_decoding

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GGUF = {"float32": "f32", "bfloat16": "bf16", "q8_0": "q8_0"}
PATIENCE_S = 300
PASSES = 9  # of each number of tokens
MOST_AT_ONCE = 8
# vLLM serves from a process of its own, and binds threads to cores unless it is asked not to.
SERVING = {**CPU, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["llamacpp", "vllm"], required=True)
    parser.add_argument("--python", required=True, help="Python of the engine's environment")
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument(
        "--drafts", type=numbers, default="2,3", help="drafts of a round, a server for each"
    )
    parser.add_argument("--concurrency", type=numbers, default="1")
    parser.add_argument("--dtype", choices=list(GGUF), default="float32", help="of the target")
    parser.add_argument("--draft-dtype", choices=list(TYPES), default="float32")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--passes", type=numbers, default=[], help="tokens of passes to time, llama.cpp only"
    )
    parser.add_argument("--server-options", default="", help="further ones, of every server")
    options = parser.parse_args()
    try:
        options.wanted = [None, *options.drafts]
        if max(options.concurrency) > MOST_AT_ONCE:
            raise UserError(f"the servers take {MOST_AT_ONCE} requests at once; ask for no more")
        if options.engine == "vllm" and options.dtype not in TYPES:
            raise UserError(f"vLLM has no target in {options.dtype}; give {' or '.join(TYPES)}")
        if options.passes and options.engine == "vllm":
            raise UserError("--passes reads llama.cpp's clock; leave it out for vLLM")
        compare(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def numbers(text: str) -> list[int]:
    """Return the numbers, at least 1 each, of a text such as 1,4,16."""
    values = [int(item) for item in text.split(",")]
    if min(values) < 1:
        raise ValueError(text)
    return values


def compare(options: argparse.Namespace) -> None:
    """Start the servers, measure them alternately, print the table."""
    wanted = options.wanted
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        head = load_for_decoding(TargetConfig(options.target, dtype="float32")).head_weight
        commands = [command(options, drafts, head, folder) for drafts in wanted]
        urls = [stack.enter_context(served(line, options, folder)) for line in commands]
        if options.passes:
            show_passes(urls[0], options)
        found: dict[tuple[int | None, int], list[ServerFigures]] = {}
        for _ in range(options.turns):
            for drafts, url in zip(wanted, urls, strict=True):
                for figures in figures_of(url, options):
                    found.setdefault((drafts, figures.concurrency), []).append(figures)
    show(found, options)


def command(
    options: argparse.Namespace, drafts: int | None, head: torch.Tensor, folder: Path
) -> list[str]:
    """Return the command of a server with so many drafts a round, or without a drafter."""
    python, model = Path(options.python).absolute(), str(Path(options.target).resolve())
    lines: list[str] = []
    if drafts is not None:
        order = argparse.Namespace(**(vars(options) | {"drafts": drafts}))
        out = folder / f"drafter-{drafts}"
        lines = exported(order, head, out, TYPES[options.draft_dtype]).splitlines()
    if options.engine == "vllm":
        speculation = ["--speculative-config", shlex.split(lines[0])[-1]] if lines else []
        limits = ["--dtype", options.dtype, "--max-model-len", "2048"]
        limits += ["--max-num-seqs", str(MOST_AT_ONCE), "--no-enable-prefix-caching"]
        server = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        return [*server, *limits, *speculation]
    if not (folder / "target.gguf").exists():
        run(options, "llamacpp/convert.py", model, "--outtype", GGUF[options.dtype], "--outfile",
            "target.gguf", folder=folder)  # fmt: skip
    speculation = ["-m", "target.gguf"]
    if lines:
        _, convert, serve = map(shlex.split, lines)
        run(options, "llamacpp/convert.py", *convert[2:], folder=folder)
        speculation = serve[1:]
    threads = ["-t", str(options.threads), "-tb", str(options.threads)]
    limits = ["-c", str(2048 * MOST_AT_ONCE), "-np", str(MOST_AT_ONCE), *threads, "--metrics"]
    limits += ["--device", "none", "--fit", "off", "--offline"]
    return [str(python.parent / "llama-server-vulkan"), *limits, *speculation]


@contextlib.contextmanager
def served(line: list[str], options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Run a server until the block ends; yield its address. Raises `UserError` if it fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, **SERVING, "OMP_NUM_THREADS": str(options.threads)}
    environment.pop("PYTHONPATH", None)
    line = [*line, "--host", "127.0.0.1", "--port", str(port), *shlex.split(options.server_options)]
    log = folder / f"{port}.log"
    with log.open("w") as out:
        server = subprocess.Popen(line, cwd=folder, env=environment, stdout=out, stderr=out)
    try:
        until = time.monotonic() + PATIENCE_S
        while not answers(url):
            if server.poll() is not None or time.monotonic() > until:
                raise UserError(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def show_passes(url: str, options: argparse.Namespace) -> None:
    """Print the median time of a pass over each number of tokens, and its ratio to that of one."""
    draw = random.Random(0)
    found: dict[int, list[float]] = {}
    for _ in range(PASSES):
        for count in sorted({1, *options.passes}):
            # Not the first 256 to 300: single bytes, of which a server can make no text.
            ids = [draw.randrange(300, 1000) for _ in range(count)]
            order = {"prompt": ids, "n_predict": 1, "cache_prompt": False, "temperature": 0}
            answer = httpx.post(f"{url}/completion", json=order, timeout=60)
            timings = answer.json().get("timings") if answer.is_success else None
            if not timings or timings["prompt_n"] != count:
                raise UserError(f"--passes: no pass over {count} tokens: {answer.text[:200]}")
            found.setdefault(count, []).append(timings["prompt_ms"])
    times = {count: statistics.median(taken) for count, taken in found.items()}
    for count, taken in times.items():
        print(f"pass over {count} tokens: {taken:.1f} ms, {taken / times[1]:.2f} times one")


def figures_of(url: str, options: argparse.Namespace) -> list[ServerFigures]:
    """Return what `draftsmith evaluate` says of the server, by concurrency."""
    report = measured(
        EvaluateOptions(
            target=TargetConfig(options.target),
            prompts=options.prompts,
            server=url,
            concurrency=options.concurrency,
            limit=options.limit,
            max_new_tokens=options.max_new_tokens,
            repeats=1,
        )
    )
    assert report.server is not None
    return report.server.settings


def show(
    found: dict[tuple[int | None, int], list[ServerFigures]], options: argparse.Namespace
) -> None:
    """Print a row for each concurrency and number of drafts."""
    table = Table(title=f"{options.engine}, target in {options.dtype}, threads {options.threads}")
    columns = ("at once", "drafts", "tau", "by position", "tokens/s", "speed-up", "ms a token")
    for name in (*columns, "faster by", "round"):
        table.add_column(name, justify="right")
    for drafts, at_once in sorted(found, key=lambda key: (key[1], key[0] or 0)):
        runs, plain = found[drafts, at_once], found[None, at_once]
        rate, plain_rate = (median([run.tokens_s for run in those]) for those in (runs, plain))
        token, plain_token = (median(later_token(those)) for those in (runs, plain))
        tau = median([run.tau_emitted for run in runs]) if drafts else 1.0
        # of a turn in which nobody reached the last depths there are fewer
        depths = zip(*(run.survival or [] for run in runs), strict=False)
        positions = " ".join(f"{median(list(shares)):.2f}" for shares in depths)
        cells = [str(at_once), str(drafts or "none"), f"{tau:.2f}", positions]
        cells += [f"{rate:.1f}", f"{rate / plain_rate:.2f}x", f"{1000 * token:.1f}"]
        cells += [f"{plain_token / token:.2f}x", f"{tau * token / plain_token:.2f}"]
        table.add_row(*cells)
    Console().print(table)
    turns = [figures for runs in found.values() for figures in runs]
    for warning in sorted({text for figures in turns for text in figures.warnings}):
        print(f"warning: {warning}")


def later_token(runs: list[ServerFigures]) -> list[float | None]:
    return [(run.tpot_quantiles_s or {}).get("p50") for run in runs]


def median(values: list[float | None]) -> float:
    """Return the median of what is known, or NaN."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else float("nan")


if __name__ == "__main__":
    main()
