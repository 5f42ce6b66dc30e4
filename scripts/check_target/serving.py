"""Do other programs get the target's own text? Greedy replies of `draftsmith serve` compared with
those of `generate`, and transformers' `generate` with an export's `custom_generate` compared with
itself.

    python scripts/check_target/serving.py --target TARGET --prompts FILE --drafter FOLDER [...]

The server gets all prompts of a drafter at once, half of them as streams.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from exactness import NEAR_TIE
from transformers import AutoModelForCausalLM

import draftsmith
from draftsmith.heads.errors import UserError
from draftsmith.inference.api import Decoder
from draftsmith.inference.base.settings import GREEDY
from draftsmith.inference.conversations.prompts import Prompt, read_prompts
from draftsmith.inference.decode import Generation
from draftsmith.inference.evaluation.measure import first_difference

CLI = "from draftsmith.commands.cli import main; main()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    given = parser.parse_args()
    try:
        decoder = draftsmith.load(given.target, dtype=given.dtype)
        target = decoder.target
        prompts = read_prompts(given.prompts, target.tokenizer, target.name)
        wrong = served(decoder, prompts, given)
        for drafter in given.drafter:
            wrong += by_transformers(decoder, drafter, prompts, given.max_new_tokens)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(f"{wrong} replies differ by more than a near-tie" if wrong else 0)


def served(decoder: Decoder, prompts: Sequence[Prompt], given: argparse.Namespace) -> int:
    """Print how many replies of a server equal `generate`'s; return how many really differ."""
    wrong = 0
    ids = [prompt.token_ids for prompt in prompts]
    alone = decoder.generate(ids, given.max_new_tokens, batch_size=1)
    with server(given) as address:
        models = httpx.get(f"{address}/v1/models").json()["data"]
        for model in [entry["id"] for entry in models if entry["parent"] is not None]:

            def ask(number: int, name: str = model) -> list[int]:
                return reply_ids(address, name, ids[number], given.max_new_tokens, number % 2 > 0)

            with ThreadPoolExecutor(len(ids)) as clients:
                replies = list(clients.map(ask, range(len(ids))))
            bad = [different(decoder, a, tokens) for a, tokens in zip(alone, replies, strict=True)]
            same = sum(a.token_ids == b for a, b in zip(alone, replies, strict=True))
            print(f"served by {model}, compared with generate: {same} of {len(ids)} equal")
            wrong += sum(bad)
        left = httpx.get(f"{address}/metrics").text
        assert "vllm:num_requests_running 0.0" in left, "rows run on in the server"
    return wrong


def different(decoder: Decoder, expected: Generation, tokens: list[int]) -> bool:
    """Return whether a reply differs from `expected` where the target is not undecided."""
    if tokens == expected.token_ids:
        return False
    other = Generation(expected.prompt_ids, tokens)
    _, gap = first_difference(decoder.target, expected, other, GREEDY)
    return gap is None or gap > NEAR_TIE[decoder.target.dtype]


def reply_ids(address: str, model: str, ids: list[int], limit: int, stream: bool) -> list[int]:
    """Return the token ids of a greedy reply to a prompt's token ids."""
    body = {"model": model, "prompt": list(ids), "max_tokens": limit, "temperature": 0}
    body |= {"return_token_ids": True, "stream": stream}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=600)
    answer.raise_for_status()
    if not stream:
        return answer.json()["choices"][0]["token_ids"]
    events = re.findall(r"^data: (\{.*\})$", answer.text, re.MULTILINE)
    return [token for e in events for token in json.loads(e)["choices"][0]["token_ids"]]


@contextmanager
def server(given: argparse.Namespace) -> Iterator[str]:
    """Start `draftsmith serve` with the drafters, yield its address, and stop it."""
    command = [sys.executable, "-c", CLI, "serve", "--target", given.target, "--port", "0"]
    command += ["--target.dtype", given.dtype]
    for drafter in given.drafter:
        command += ["--drafter", drafter]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            said += line
            if found := re.search(r"page: (http://\S+)", line):
                yield found[1]
                return
        raise UserError(f"the server has not started: {said.strip()}")
    finally:
        process.terminate()
        process.wait(60)


def by_transformers(decoder: Decoder, drafter: str, prompts: Sequence[Prompt], limit: int) -> int:
    """Print how many replies of `custom_generate` equal plain `generate`'s.

    Returns how many of them really differ.
    """
    model = AutoModelForCausalLM.from_pretrained(decoder.target.name, dtype=decoder.target.dtype)
    wrong = same = 0
    with tempfile.TemporaryDirectory() as folder:
        export = str(Path(folder) / "export")
        draftsmith.export(drafter, "hf", export)
        for prompt in prompts:
            ids = torch.tensor([prompt.token_ids])
            common = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            common |= {"max_new_tokens": limit, "do_sample": False}
            plain, ours = (
                model.generate(**common, **more)[0, ids.shape[1] :].tolist()  # type: ignore[operator]
                for more in ({}, {"custom_generate": export, "trust_remote_code": True})
            )
            same += plain == ours
            wrong += different(decoder, Generation(list(prompt.token_ids), plain), ours)
    name = Path(drafter).parent.name
    print(f"custom_generate of {name}, compared with plain: {same} of {len(prompts)} equal")
    return wrong


if __name__ == "__main__":
    main()
