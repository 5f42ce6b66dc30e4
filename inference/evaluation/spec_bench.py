"""Replies in the form that Spec-Bench's own evaluation reads."""

from __future__ import annotations

import json
from pathlib import Path

from ...heads.files import JsonObject, whole_directory
from ..metrics import emitted_per_round
from ..targets.target import Target
from .measure import Results


def write_spec_bench(folder: Path, results: Results, target: Target) -> None:
    """Write a new folder with a file for each way to decode, in which a line is a question."""
    with whole_directory(folder) as aside:
        aside.mkdir(exist_ok=True)
        for name, turns in results.items():
            rows: dict[str, JsonObject] = {}
            for turn in turns:
                prompt, reply = turn.prompt, turn.generation
                if prompt.id not in rows:
                    keys = ("turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths")
                    rows[prompt.id] = {
                        "question_id": prompt.id,
                        "category": prompt.category,
                        "model_id": name,
                        "choices": [{key: [] for key in keys}],
                    }
                choice = rows[prompt.id]["choices"][0]
                text = target.tokenizer.decode(reply.token_ids, skip_special_tokens=True)
                choice["turns"].append(text)
                choice["decoding_steps"].append(len(reply.rounds))
                choice["new_tokens"].append(len(reply.token_ids))
                choice["wall_time"].append(reply.ttft_s + reply.decode_s)
                # of all turns in one list, as Spec-Bench's own scripts write them
                choice["accept_lengths"] += emitted_per_round(reply)
            lines = "".join(json.dumps(row) + "\n" for row in rows.values())
            (aside / f"{name.replace('/', '-').replace(':', '-')}.jsonl").write_text(lines)
