"""`draftsmith data regenerate`: keep the prompts of a data set, let the target write the replies.

Training on the target's own words is the largest single lever there is (drafter-recipes 11). The
token ids that the target was given and those that it wrote are kept as they were, so nothing is
tokenised twice. Each finished conversation is one appended line; a second call with the same output
goes on behind the last whole one.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from ...heads.errors import UserError
from ...heads.files import check_output
from ...inference.console import Progress
from ...inference.conversations.formats import RowError
from ...inference.conversations.rows import LeftOut, warn_of_plain_text
from ...inference.conversations.sources import rows_of
from ...inference.target import PROCESSORS, Target, load_target
from ..options import RegenerateOptions as Options
from ..options import ReplySampling
from .replies import regenerate_on_server
from .tasks import Sink, Task, mend, refuse_other

log = logging.getLogger(__name__)


def run(options: Options) -> None:
    check_output(options.out, "--out")
    out = Path(options.out)
    if out.exists() and out.resolve() == Path(options.data).resolve():
        raise UserError("--out must be another file than --data")
    rows = list(rows_of(options.data))[: options.limit]
    if not rows:
        raise UserError(f"{options.data} holds no rows")
    facts = provenance_of(options)
    finished, written = mend(out)
    refuse_other(out, written, facts)
    tasks, left_out, ids = [], LeftOut(options.data, options.bad_rows), Counter[str]()
    for name, row in rows:
        try:
            task = Task.of(name, row, options.chat_template_kwargs)
        except RowError as error:
            left_out.add(name, error)
            continue
        ids[task.id] += 1
        if ids[task.id] > 1:
            task.id += f"#{ids[task.id]}"
        if task.id not in finished:
            tasks.append(task)
    if left_out.count == len(rows):
        raise UserError(
            f"{options.data}: no row can be used; the first is {left_out.first}; mend it"
        )
    if finished:
        log.info("%s already holds %d conversations; %d are left", out, len(finished), len(tasks))
    if not tasks:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        out.open("a", encoding="utf-8") as file,
        Progress(total=len(tasks), desc="target writes", unit=" conversations") as progress,
    ):
        sink = Sink(file, progress, facts, written)
        if options.server.url is not None:
            regenerate_on_server(tasks, options, sink)
        else:
            regenerate_here(tasks, options, sink)
    log.info(
        "%s: %d conversations, %d tokens written by the target, %d without an end",
        out,
        sink.rows,
        sink.tokens,
        sink.cut,
    )


def provenance_of(options: Options) -> dict[str, Any]:
    facts: dict[str, Any] = {"target": options.target.path, "sampling": asdict(options.sampling)}
    if options.chat_template_kwargs:
        facts["chat_template_kwargs"] = options.chat_template_kwargs
    if options.server.url is not None:
        facts["server"] = options.server.url
    return facts


def regenerate_here(tasks: Sequence[Task], options: Options, sink: Sink) -> None:
    """Batched sampling with the target in this process. Batches hold prompts of similar length."""
    target = load_target(options.target)
    fingerprint = target.fingerprint()
    sink.add_provenance(
        {"tokenizer_hash": fingerprint.tokenizer_hash, "weights_hash": fingerprint.weights_hash}
    )
    plain = sum(task.conversation.messages is None for task in tasks)
    warn_of_plain_text(plain, target.tokenizer, options.data)
    room = target.max_positions - 1
    longest = min(options.max_prompt_tokens or room, room)
    waiting: list[tuple[list[int], Task]] = []
    unreadable, overlong = LeftOut(options.data, options.bad_rows), []
    for task in tasks:
        try:
            prompt = task.prompt(target)
        except RowError as error:
            unreadable.add(task.id, error)
            continue
        if len(prompt) > longest:
            overlong.append(f"{task.id} ({len(prompt)} tokens, at most {longest} fit)")
        else:
            waiting.append((prompt, task))
    if overlong:
        log.warning("%d prompts are left out; the first is %s", len(overlong), overlong[0])
    while waiting:
        batch = take_batch(
            waiting, options.batch_size, options.sampling.max_new_tokens, target.max_positions
        )
        replies = sample(
            target,
            [prompt for prompt, _ in batch],
            options.sampling,
            seed_of(options.sampling.seed, batch[0]),
        )
        for (prompt, task), reply in zip(batch, replies, strict=True):
            ended = bool(reply) and reply[-1] in target.eos_ids
            text = target.tokenizer.decode(reply[:-1] if ended else reply)
            task.add_reply(
                prompt, reply, {"role": "assistant", "content": text}, "stop" if ended else "length"
            )
            if not task.done and ended:
                task.advance()
                following = task.prompt(target)
                if len(following) <= longest:
                    waiting.append((following, task))
                    continue
            sink.put(task)


def take_batch(
    waiting: list[tuple[list[int], Task]], size: int, max_new_tokens: int, positions: int
) -> list[tuple[list[int], Task]]:
    """The shortest prompts, off the list; none takes room for its reply from another by being
    longer."""

    def room(prompt: list[int]) -> int:
        return min(max_new_tokens, positions - len(prompt))

    waiting.sort(key=lambda item: len(item[0]))
    count = 1
    while count < min(size, len(waiting)) and room(waiting[count][0]) == room(waiting[0][0]):
        count += 1
    batch = waiting[:count]
    del waiting[:count]
    return batch


def seed_of(seed: int, first: tuple[list[int], Task]) -> int:
    """Seed of a batch, from what is in it: a resumed run does not repeat the noise of the first."""
    return zlib.crc32(f"{seed} {first[1].id} {len(first[0])}".encode())


@torch.inference_mode()
def sample(
    target: Target, prompts: list[list[int]], sampling: ReplySampling, seed: int
) -> list[list[int]]:
    """One reply for each prompt, cut behind its end token; `generate` with left padding."""
    width = max(map(len, prompts))
    pad = next(iter(target.eos_ids), 0)
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=target.device)
    mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device
    )
    torch.manual_seed(seed)
    options: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        options = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
    # The target's own config may carry penalties that are neither recorded nor applied when drafts
    # are verified.
    options |= {name: PROCESSORS[name][-1] for name in target.processors}
    options |= {"pad_token_id": pad, "eos_token_id": sorted(target.eos_ids) or None}
    room = min(sampling.max_new_tokens, target.max_positions - width)
    config = GenerationConfig(max_new_tokens=room, **options)
    out = target.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    replies = []
    for row in out[:, width:].tolist():
        end = next((i for i, token in enumerate(row) if token in target.eos_ids), len(row) - 1)
        replies.append(row[: end + 1])
    return replies
