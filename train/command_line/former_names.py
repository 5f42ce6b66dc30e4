"""Names that options had before: what to use in their place, and the few that are still read.

Both tables have the dataclass that the option was in: the command's, with the dotted name, or that
of a part, such as `TargetConfig`, with the last name alone.
"""

from __future__ import annotations

from typing import Any

FORMER_NAMES: dict[str, dict[str, str]] = {
    "GenerateOptions": {
        "color": "accepted drafts are green on a terminal; NO_COLOR=1 turns that off",
        "raw": 'give a JSON row {"text": ...} by --prompts, which gets no chat template',
        "stop": "give stop to Decoder.generate in Python, or in a request to draftsmith serve",
    },
    "RegenerateOptions": {
        "max_prompt_tokens": "prompts that do not fit the target are left out",
        "server.api_key_file": "set the variable DRAFTSMITH_SERVER_KEY to the key of the server",
        "server.retries": "a failed request is tried again for half a minute",
        "server.timeout_s": "a reply may take 10 minutes",
    },
    "SourceOptions": {"streaming": "save the rows that you need as JSONL"},
    "RowSource": {"streaming": "save the rows that you need as JSONL"},
    "SplitOptions": {
        "out_train": "--out FOLDER gets train.jsonl and held_out.jsonl",
        "out_test": "--out FOLDER gets train.jsonl and held_out.jsonl",
        "seed": "the side of a conversation depends on its text alone",
    },
    "TargetConfig": {"fused": "an attention, such as sdpa, is by transformers' own forward pass"},
}
"""One line for the user about each option that went."""
STILL_READ = {
    "Evaluation": {"prompts": "limit"},
    "RegenerateOptions": {"sampling.max_new_tokens": "max_new_tokens"},
    "Rollouts": {"prompts": "limit"},
}
"""Options that have another name now, which is in the same part or, with a dotted name, anywhere;
scripts that give the former one go on."""


def entry_of(table: dict[str, dict[str, str]], name: str, owner: Any, part: Any) -> str | None:
    """Return what a table has for the option `name` of the dataclass `owner`, or None.

    `part` is the dataclass of the part that the dotted name begins with, or None.
    """
    for config_class, key in ((owner, name), (part, name.rpartition(".")[2])):
        for one in getattr(config_class, "__mro__", ()):
            if found := table.get(one.__name__, {}).get(key):
                return found
    return None
