"""`draftsmith evaluate`: every drafter beside plain decoding, on the same prompts, in the loop that users decode with.

Drafters take turns on each prompt, so that a machine that slows down slows all of them. Of `repeats` runs of a request the one
of median decode time is kept; tokens and rounds are the same in all of them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ..heads.errors import UserError
from ..heads.files import whole_file, write_json
from . import replayed
from .decode import Generation, Request, generate
from .metrics import alpha, batch_seconds, bootstrap, kept_per_round, mean, split, summarise, tau
from .proposer import PlainDecoding, Proposer, check_spec, load_proposer
from .rows import Prompt, read_prompts
from .sampling import Sampling
from .target import Target, TargetConfig, load_target

EXAMPLE = "draftsmith evaluate --target TARGET --drafter runs/medusa/best --prompts held_out.jsonl --json out.json"
SCHEMA = 1
SHOWN = 3  # positions whose acceptance the table shows; the JSON holds all


@dataclass
class Options:
    """Acceptance and speed of drafters on held-out prompts, beside plain decoding in the same loop.

    `--sampling.temperature 0.7` may be written `--temperature 0.7`, and so on.
    """

    target: TargetConfig = field(default_factory=lambda: TargetConfig(""))
    prompts: str | None = None
    """JSON or JSONL file of prompts or conversations."""
    features: str | None = None
    """Instead of a target and prompts: a feature store, on whose held-out texts drafters are replayed (greedy)."""
    drafter: list[str] = field(default_factory=list)
    """A drafter's folder, a small model's folder, or ngram, suffix, lookahead, early-exit; settings follow a colon:
    ngram:length=8. May be given several times. Plain decoding is always there."""
    sampling: Sampling = field(default_factory=Sampling)
    """Greedy if not given."""
    limit: int | None = None
    """Use the first so many prompts."""
    max_new_tokens: int = 128
    """Longest reply."""
    batch_size: int = 1
    """Prompts decoded together."""
    repeats: int = 3
    """Timed runs of every request."""
    json: str | None = None
    """Write the numbers to this file."""


def run(options: Options) -> None:
    check(options)
    if options.features is not None:
        return replayed.run(options)
    assert options.prompts is not None
    target = load_target(options.target)
    proposers: list[Proposer] = [PlainDecoding()]
    warn = lambda message: print(f"warning: {message}", file=sys.stderr)  # noqa: E731
    proposers += [load_proposer(spec, target, warn) for spec in options.drafter if spec != "none"]
    prompts = read_prompts(options.prompts, target.tokenizer, target.name, options.limit)
    results = compare(target, proposers, prompts, options)
    report = make_report(target, prompts, results, options)
    if options.json is not None:
        with whole_file(options.json) as aside:
            write_json(aside, report)
    show(report)


def check(options: Options) -> None:
    """What can be known to be wrong before a large target loads, or hours are spent. Raises `UserError`."""
    for name in ("limit", "max_new_tokens", "batch_size", "repeats"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if (options.features is None) == (options.prompts is None):
        raise UserError("give either --target and --prompts to decode, or --features to replay")
    if options.prompts is not None and not Path(options.prompts).is_file():
        raise UserError(f"cannot read {options.prompts}: there is no such file; check the path")
    for spec in options.drafter:
        check_spec(spec)
    if options.json is not None and Path(options.json).is_dir():
        raise UserError(f"cannot write {options.json}: it is a folder; name a file")


def request_record(target: Target, prompt: Prompt, plain: Generation, found: Generation, sampling: Sampling) -> dict[str, Any]:
    """One request, in the names of evaluation.md section 2."""
    rounds = found.rounds
    equal = plain.token_ids == found.token_ids if comparable(found) else None
    index, gap = divergence(target, plain, found, sampling) if equal is False else (None, None)
    return {
        "id": prompt.id,
        "category": prompt.category,
        "n_prompt": len(found.prompt_ids),
        "n_out": len(found.token_ids),
        "n_rounds": len(rounds),
        "accepted_hist": _histogram([r.accepted for r in rounds]),
        "drafted_hist": _histogram([r.drafted or 0 for r in rounds]),
        "tau_incl_bonus": tau([kept_per_round(found)]) if rounds else None,
        "ttft_s": found.ttft_s,
        "decode_s": found.decode_s,
        "tpot_s": found.decode_s / (len(found.token_ids) - 1) if len(found.token_ids) > 1 else None,
        "rb_tau": mean([r.expected for r in rounds]),
        "alpha": alpha([r.overlap for r in rounds]),
        **{f"t_{part}_s": seconds for part, seconds in split(rounds).items()},
        "finish_reason": found.finish_reason,
        "equal_to_ar": equal,
        "first_divergence": index,
        "top2_gap": gap,
        "verify_mode": rounds[0].rule if rounds else None,
    }


Results = dict[str, list[Generation]]


def compare(target: Target, proposers: Sequence[Proposer], prompts: Sequence[Prompt], options: Options) -> Results:
    """Decode every prompt with every proposer, taking turns; of `repeats` runs the one of median decode time is kept."""
    names = _distinct_names(proposers)
    requests = [Request(prompt.token_ids, i) for i, prompt in enumerate(prompts)]
    for proposer in proposers:  # warm up
        generate(target, proposer, requests[:1], min(options.max_new_tokens, 8), options.sampling)
    results: Results = {name: [] for name in names}
    progress = tqdm(total=len(prompts), desc="decoding", unit=" prompts", disable=None, leave=False)
    for start in range(0, len(requests), options.batch_size):
        batch = requests[start : start + options.batch_size]
        runs: dict[str, list[list[Generation]]] = {name: [] for name in names}
        for _ in range(options.repeats):
            for name, proposer in zip(names, proposers, strict=True):
                runs[name].append(generate(target, proposer, batch, options.max_new_tokens, options.sampling))
        for name in names:
            results[name] += sorted(runs[name], key=batch_seconds)[options.repeats // 2]
        progress.update(len(batch))
    progress.close()
    return results


def _distinct_names(proposers: Sequence[Proposer]) -> list[str]:
    names: list[str] = []
    for proposer in proposers:
        name, number = proposer.name, 2
        while name in names:
            name, number = f"{proposer.name}-{number}", number + 1
        names.append(name)
    return names


def make_report(target: Target, prompts: Sequence[Prompt], results: Results, options: Options) -> dict[str, Any]:
    """The numbers of every drafter, with what they were measured on."""
    plain = results["plain"]
    sampling = options.sampling.resolved(target.repetition_penalty)
    drafters = {}
    size = options.batch_size
    for name, generations in results.items():
        summary = summarise(generations, size)
        pairs = list(zip(plain, generations, strict=True))
        batches = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        seconds = [(batch_seconds([a for a, _ in batch]), batch_seconds([b for _, b in batch])) for batch in batches]
        summary["speedup"] = _ratio(seconds)
        summary["speedup_ci95"] = bootstrap(seconds, _ratio)
        summary["speedup_median"] = statistics.median(a / b for a, b in seconds if b)
        same = [a.token_ids == b.token_ids for a, b in pairs if comparable(b)]
        summary["equal_to_ar"] = sum(same) if same else None
        summary["per_request"] = [
            request_record(target, prompt, a, b, sampling) for prompt, (a, b) in zip(prompts, pairs, strict=True)
        ]
        summary["accepted_hist"] = _histogram([r.accepted for g in generations for r in g.rounds])
        drafters[name] = summary
    return {
        "schema_version": SCHEMA,
        "target": target.fingerprint().as_dict(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "lossless": sampling.lossless,
        "sampling": asdict(sampling),
        "batch": size,
        "options": asdict(options),
        "definitions": DEFINITIONS,
        "drafters": drafters,
    }


DEFINITIONS = {
    "tau_incl_bonus": "tokens kept per round, the target's own included, the prefill's excluded, pooled over requests",
    "tau_ci95": "95% bootstrap interval over prompts, 1000 resamples",
    "tau_by_position": "tau of the rounds whose root stands below that position",
    "survival": "share of rounds that accepted at least d drafts",
    "cond_accept": "survival at d over survival at d - 1",
    "tokens_s": "tokens of all rounds / their wall time, prefill excluded",
    "speedup": "sum of plain decode times / sum of this drafter's over the same prompts, prefill excluded",
    "verify_mode": "the rule that decided: greedy, gumbel (coupled noise), match, block, traversal, rrs, or typical (lossy)",
    "rb_tau": "1 + sum of the target's probabilities of the drafted paths: tau in expectation; for fixed drafts at T > 0",
    "alpha": "mean sum of min(p, q) at each depth on accepted prefixes; rules that compare laws only",
    "loop_share": "share of replies that repeat an 8-gram; loops flatter every drafter",
    "equal_to_ar": "replies equal to plain decoding with the same noise, token for token; null for rules that keep the law only",
    "first_divergence": "index of the first token that differs from plain decoding",
    "top2_gap": "the target's best logit minus its second best there: near-ties flip in low precision, others must not",
}


def _ratio(seconds: Sequence[tuple[float, float]]) -> float:
    drafted = sum(b for _, b in seconds)
    return sum(a for a, _ in seconds) / drafted if drafted else float("nan")


@torch.inference_mode()
def divergence(target: Target, plain: Generation, other: Generation, sampling: Sampling) -> tuple[int, float | None]:
    """Index of the first token in which two replies differ, and by how much the target prefers its best token there.

    The preference is in logits after a penalty, and known for greedy decoding only.

    In low precision near-ties flip, because a tree is verified in another batch shape; a large gap would be a bug.
    """
    both = zip(plain.token_ids, other.token_ids, strict=False)
    index = next((i for i, (a, b) in enumerate(both) if a != b), min(len(plain.token_ids), len(other.token_ids)))
    if not sampling.greedy:
        return index, None
    ids: Any = torch.tensor([plain.prompt_ids + plain.token_ids[:index]], device=target.device)
    scores = target.head(target.forward(ids).last[:, -1]).float()
    if sampling.history_processor is not None:
        scores = sampling.history_processor(ids, scores)
    best = scores[0].topk(2).values
    return index, float(best[0] - best[1])


def comparable(generation: Generation) -> bool:
    """Whether plain decoding with the same noise must write the same text; rules that compare laws keep the law, not the text."""
    return all(round_.rule in ("greedy", "gumbel", "match") for round_ in generation.rounds)


def _histogram(values: list[int]) -> list[int]:
    return [values.count(v) for v in range(max(values, default=-1) + 1)]


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the table a person looks at."""
    drafters = report["drafters"]
    requests = drafters["plain"]["requests"]
    law = f"T = {report['sampling']['temperature']:g}" + ("" if report["lossless"] else ", LOSSY typical acceptance")
    prompts = f"{requests} held-out prompt{'s' if requests > 1 else ''}"
    table = Table(
        title=f"{report['target']['name']}\n{prompts}, {law}, batch {report['batch']}, {report['dtype']}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("drafter", overflow="fold", min_width=18)
    for column in ("tau", "95%", f"accepted 1-{SHOWN}", "tok/s", "speed-up", "identical"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, s in drafters.items():
        low, high = s["tau_ci95"]
        table.add_row(
            name,
            f"{s['tau_incl_bonus']:.2f}",
            f"{low:.2f}-{high:.2f}" if s["mean_n_draft"] else "-",
            " ".join(f"{x:.2f}".removeprefix("0") for x in s["survival"][:SHOWN]) or "-",
            f"{s['tokens_s']:.0f}",
            f"{s['speedup']:.2f}x",
            "-" if s["equal_to_ar"] is None else "yes" if s["equal_to_ar"] == requests else f"{s['equal_to_ar']} of {requests}",
        )
    console = console or Console()
    console.print(table)
    for name, s in drafters.items():
        gaps = [r["top2_gap"] for r in s["per_request"] if r["top2_gap"] is not None]
        if gaps:
            console.print(f"{name}: where a reply first differs, the target's two best logits are at most {max(gaps):.2g} apart.")
    console.print(
        f"tau: tokens a round. Loop share (replies that repeat an 8-gram): {drafters['plain']['loop_share']:.0%}; loops flatter "
        "every drafter."
    )
