"""Greedy replies of a vLLM with a drafter, and what its counters say. Run by the Python of an
environment that has vLLM:

    VLLM_PYTHON scripts/vllm/counts.py JOB.json RESULT.json

JOB: `model` (the target, or a drafter in speculators' format), `prompts` (token ids), `max_tokens`,
`speculative_config` or null. RESULT: `tokens` of each reply, and its `counts`: `drafts` (rounds
with drafts), `drafted`, `accepted`, `by_position` (accepted at least 1, 2, ..).
"""

import json
import sys
from pathlib import Path
from typing import Any

NAMES = {"num_drafts": "drafts", "num_draft_tokens": "drafted", "num_accepted_tokens": "accepted"}
Counters = dict[str, Any]


def counters(llm: Any) -> Counters:
    """Return what the engine has counted of its speculation since it started."""
    found: Counters = {}
    for metric in llm.get_metrics():
        kind = metric.name.removeprefix("vllm:spec_decode_")
        if kind in NAMES:
            found[NAMES[kind]] = metric.value
        elif kind == "num_accepted_tokens_per_pos":
            found["by_position"] = list(metric.values)
    return found


def between(before: Counters, after: Counters) -> Counters:
    """Return the counts of what happened in between."""
    new: Counters = {
        name: after[name] - before.get(name, 0) for name in NAMES.values() if name in after
    }
    if "by_position" in after:
        start = before.get("by_position") or [0] * len(after["by_position"])
        new["by_position"] = [b - a for a, b in zip(start, after["by_position"], strict=True)]
    return new


if __name__ == "__main__":
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    job = json.loads(Path(sys.argv[1]).read_text())
    speculation = (
        {"speculative_config": job["speculative_config"]} if job["speculative_config"] else {}
    )
    # fp32, one step at a time and nothing reused, so that counts can be equal and not only close.
    llm = LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=8,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **speculation,
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], detokenize=False)
    found: dict[str, Any] = {"tokens": [], "counts": []}
    # One after another, so that the counters' growth is that of one prompt.
    before = counters(llm)
    for ids in job["prompts"]:
        (output,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        found["tokens"].append(list(output.outputs[0].token_ids))
        after = counters(llm)
        found["counts"].append(between(before, after))
        before = after
    Path(sys.argv[2]).write_text(json.dumps(found))
