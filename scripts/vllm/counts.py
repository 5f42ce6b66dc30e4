"""Greedy replies of a vLLM with a drafter, and what its counters say. Run by the Python of an
environment that has vLLM:

    VLLM_PYTHON scripts/vllm/counts.py JOB.json RESULT.json

JOB: `model` (the target, or a drafter in speculators' format), `prompts` (token ids), `max_tokens`,
`speculative_config` or null. RESULT: `tokens` of each reply, `drafts` (rounds with drafts),
`drafted`, `accepted`, `by_position` (accepted at least 1, 2, ..).
"""

import json
import sys
from pathlib import Path
from typing import Any

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
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False
    )
    found: dict[str, Any] = {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}
    for metric in llm.get_metrics():
        kind = metric.name.removeprefix("vllm:spec_decode_")
        if kind == "num_drafts":
            found["drafts"] = metric.value
        elif kind == "num_draft_tokens":
            found["drafted"] = metric.value
        elif kind == "num_accepted_tokens":
            found["accepted"] = metric.value
        elif kind == "num_accepted_tokens_per_pos":
            found["by_position"] = metric.values
    Path(sys.argv[2]).write_text(json.dumps(found))
