"""An engine's counters compared with ours, prompt by prompt, for one drafter: greedy, float32.

    python scripts/bench/engine_counts.py --engine llamacpp \
        --python "$(scripts/llamacpp/environment.sh)" --target models/smollm2-135m-instruct \
        --drafter runs/smollm2/eagle/best --prompts runs/smollm2/test.prompts.jsonl --limit 24

The drafter is exported and served by the engine, which answers one prompt after another, without
the drafter too. Ours is `--like ENGINE:drafts=K`. Compared are the texts, the rounds and the drafts
accepted at each position. Where texts differ, the engine's own with and without the drafter
included, the gap of the target's two best logits there is printed; where only counts do, the
smallest gap of the drafter's. A gap of `TIE` or less is a near tie, which another order of sums may
decide; anything else ends in exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange.engines.engine import ExportRequest
from draftsmith.heads.exchange.exporter import export, load_without_target
from draftsmith.inference.base.settings import GREEDY, TargetConfig
from draftsmith.inference.conversations.prompts import read_prompts
from draftsmith.inference.decode import Generation, generate_one
from draftsmith.inference.evaluation.engines import ImitatedEngine
from draftsmith.inference.evaluation.measure import first_difference
from draftsmith.inference.proposers.contract import Proposer
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.rounds.sampling import Draws
from draftsmith.inference.targets.target import Target, load_for_decoding

SCRIPTS = Path(__file__).parents[1]
TIE = 1e-3
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
Counts = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["llamacpp", "vllm"], required=True)
    parser.add_argument("--python", required=True, help="Python of the engine's environment")
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            wrong = compare(options, Path(folder))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(1 if wrong else 0)


def compare(options: argparse.Namespace, folder: Path) -> int:
    """Print a line for each difference and the sums; return how many are not near-ties."""
    target = load_for_decoding(TargetConfig(options.target, dtype="float32"))
    prompts = [
        prompt.token_ids
        for prompt in read_prompts(options.prompts, target.tokenizer, target.name, options.limit)
    ]
    engine = served_by_llamacpp if options.engine == "llamacpp" else served_by_vllm
    commands = exported(options, target.head_weight, folder / "drafter")
    plain, theirs = engine(options, commands, prompts, folder)
    proposer = imitation(options, target)
    wrong = equal = 0
    differences: list[str] = []
    sums: list[Counts] = [{}, {}]
    for place, prompt in enumerate(prompts):
        alone = generate_one(target, PlainDecoding(), prompt, options.max_new_tokens)
        with Watch() as watch:
            mine = generate_one(target, proposer, prompt, options.max_new_tokens)
        if mine.token_ids != alone.token_ids:
            raise SystemExit(f"prompt {place}: our own text differs from plain decoding's")
        without, other = (Generation(prompt, of["tokens"][place]) for of in (plain, theirs))
        if other.token_ids != without.token_ids:
            gap, kind = difference(target, without, other)
            wrong += gap > TIE
            differences.append(f"prompt {place}: speculation changed the engine's text: {kind}")
        if other.token_ids != mine.token_ids:
            gap, kind = difference(target, alone, other)
        else:
            ours, counted = counts_of(mine, options), theirs["counts"][place]
            for total, one in zip(sums, (ours, counted), strict=True):
                add(total, one)
            if ours == counted:
                equal += 1
                continue
            gap, kind = watch.least, f"{counted} there, {ours} here; the drafter's least gap is "
            kind += f"{gap:.1e}"
        wrong += gap > TIE
        differences.append(f"prompt {place}: {kind}")
    print("\n".join(differences))
    print(f"{equal} of {len(prompts)} prompts equal, {len(differences)} differences")
    for name, total in zip(("here", options.engine), sums, strict=True):
        if not total:
            raise UserError("no text of the engine equals ours, so counts cannot be compared")
        tau = 1 + total["accepted"] / total["drafts"]
        print(f"{name}, where the texts are equal: {total}, tau {tau:.3f}")
    return wrong


def difference(target: Target, one: Generation, other: Generation) -> tuple[float, str]:
    """Return the target's gap where two replies begin to differ, and that in words."""
    at, gap = first_difference(target, one, other, GREEDY)
    assert gap is not None
    return gap, f"other text from token {at} on; the target's gap there is {gap:.1e}"


class Watch:
    """Notes the least gap between the two likeliest tokens of the drafts chosen meanwhile."""

    def __enter__(self) -> Watch:
        self.least, self._guess = float("inf"), Draws.guess

        def guess(draws: Draws, logits: Any, *rest: Any) -> Any:
            best = logits.float().topk(2, dim=-1).values
            self.least = min(self.least, float((best[..., 0] - best[..., 1]).min()))
            return self._guess(draws, logits, *rest)

        Draws.guess = guess  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Draws.guess = self._guess  # type: ignore[method-assign]


def imitation(options: argparse.Namespace, target: Target) -> Proposer:
    """Return our drafter as the engine drafts with it."""
    like = ImitatedEngine(f"{options.engine}:drafts={options.drafts}")
    proposer = load_proposer(options.drafter, target, print)
    return load_proposer(options.drafter, target, print, like.shape(proposer))


def counts_of(reply: Generation, options: argparse.Namespace) -> Counts:
    """Return the counts of our rounds as the engine counts.

    llama.cpp drafts no more than can be emitted before the limit, one token being the target's own;
    vLLM always drafts a whole chain, as we do. Drafts after an end token count as accepted.
    """
    emitted, accepted_of = 1, []  # the first token is the prefill's
    for round_ in reply.rounds:
        drafts = options.drafts
        if options.engine == "llamacpp":
            drafts = min(drafts, options.max_new_tokens - emitted - 1)
        emitted += len(round_.tokens)
        if drafts > 0:
            accepted_of.append(min(round_.accepted, drafts))
    depths = range(1, options.drafts + 1)
    return {
        "drafts": len(accepted_of),
        "accepted": sum(accepted_of),
        "by_position": [sum(accepted >= depth for accepted in accepted_of) for depth in depths],
    }


def add(total: Counts, one: Counts) -> None:
    for name in ("drafts", "accepted"):
        total[name] = total.get(name, 0) + one[name]
    before = total.get("by_position", [0] * len(one["by_position"]))
    total["by_position"] = [a + b for a, b in zip(before, one["by_position"], strict=True)]


def exported(
    options: argparse.Namespace,
    head: torch.Tensor,
    out: Path,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Write the export in `dtype` and return the commands that serve it."""
    artifact = load_without_target(options.drafter)
    order = ExportRequest(
        options.engine, str(out), str(Path(options.target).resolve()), options.drafts, dtype
    )
    return export(artifact, order, head=head).serve


def served_by_llamacpp(
    options: argparse.Namespace, commands: str, prompts: list[list[int]], folder: Path
) -> tuple[Counts, Counts]:
    """Return what a llama-server answers and counts without and with the drafter."""
    _, convert, serve = (shlex.split(line) for line in commands.splitlines())
    model = str(Path(options.target).resolve())
    run(options, "llamacpp/convert.py", model, "--outtype", "f32", "--outfile", "target.gguf",
        folder=folder)  # fmt: skip
    run(options, "llamacpp/convert.py", *convert[2:], folder=folder)
    found = []
    for given in (["-m", "target.gguf"], serve[1:]):
        job = {"options": given, "texts": []}
        found.append(answers(options, "llamacpp", job, prompts, folder))
    for counts in found[1]["counts"]:
        counts["by_position"] += [0] * (options.drafts - len(counts["by_position"]))
        del counts["drafted"]
    return found[0], found[1]


def served_by_vllm(
    options: argparse.Namespace, commands: str, prompts: list[list[int]], folder: Path
) -> tuple[Counts, Counts]:
    """Return what a vLLM answers and counts without and with the drafter."""
    command = shlex.split(commands)
    found = []
    for speculation in (None, json.loads(command[-1])):
        job = {
            "model": str(Path(options.target).resolve()),
            "max_model_len": 2048,
            "speculative_config": speculation,
        }
        found.append(answers(options, "vllm", job, prompts, folder))
    for counts in found[1]["counts"]:
        del counts["drafted"]
    return found[0], found[1]


def answers(
    options: argparse.Namespace, engine: str, job: Counts, prompts: list[list[int]], folder: Path
) -> Counts:
    """Return what scripts/ENGINE/counts.py says of the prompts."""
    job |= {"prompts": prompts, "max_tokens": options.max_new_tokens}
    (folder / "job.json").write_text(json.dumps(job))
    run(options, f"{engine}/counts.py", "job.json", "result.json", folder=folder)
    return json.loads((folder / "result.json").read_text())


def run(options: argparse.Namespace, script: str, *arguments: str, folder: Path) -> None:
    """Run one of our scripts in the engine's environment. Raises `UserError` if it fails."""
    environment = {**os.environ, **CPU}
    environment.pop("PYTHONPATH", None)
    command = [str(Path(options.python).absolute()), str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise UserError(f"{script} failed:\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
