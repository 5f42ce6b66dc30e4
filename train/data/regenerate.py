"""`draftsmith data regenerate`: keep the prompts of a data set, let the target write the replies.

Nothing else raises tau as much as training on replies that the target wrote
(docs/data.md#target-written-replies). The token ids that the target was given and those that it
wrote are stored as they were, so nothing is tokenised twice. Each finished conversation is appended
as one line, or one for each of its sequences; a second call with the same output goes on behind the
last complete one.
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
from ...inference.targets.model_head import PROCESSORS
from ...inference.targets.target import Target, load_target
from ..options import RegenerateOptions as Options
from ..options import ReplySampling
from .replies import regenerate_on_server
from .tasks import Sink, Task, mend, refuse_other

log = logging.getLogger(__name__)


def run(options: Options) -> None:
    """Run the command. Raises `UserError` before the target is loaded where that is possible."""
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
    tasks = tasks_of(rows, options, finished)
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


def tasks_of(rows: list[tuple[str, Any]], options: Options, finished: set[str]) -> list[Task]:
    """Return the tasks of `rows` whose ids are not in `finished`.

    Raises `UserError` if no row can be used, or at the first malformed one if `bad_rows` is stop.
    """
    tasks, left_out, ids = [], LeftOut(options.data, options.bad_rows), Counter[str]()
    for name, row in rows:
        try:
            task = Task.of(name, row, options.chat_template_kwargs)
        except RowError as error:
            left_out.add(name, error)
            continue
        # Rows may have the same id. They get a number, the same in every call with the same rows.
        ids[task.id] += 1
        if ids[task.id] > 1:
            task.id += f"#{ids[task.id]}"
        if task.id not in finished:
            tasks.append(task)
    if left_out.count == len(rows):
        raise UserError(
            f"{options.data}: no row can be used; the first is {left_out.first}; mend it"
        )
    return tasks


def provenance_of(options: Options) -> dict[str, Any]:
    """Return what every row records of how it was written."""
    facts: dict[str, Any] = {"target": options.target.path, "sampling": asdict(options.sampling)}
    if options.chat_template_kwargs:
        facts["chat_template_kwargs"] = options.chat_template_kwargs
    if options.server.url is not None:
        facts["server"] = options.server.url
    return facts


def regenerate_here(tasks: Sequence[Task], options: Options, sink: Sink) -> None:
    """Write the replies of all tasks with the target in this process, in batches of prompts.

    A conversation of several turns comes back into the queue after each reply. Prompts that are too
    long are left out with a warning.
    """
    target = load_target(options.target)
    fingerprint = target.fingerprint()
    sink.add_provenance(
        {"tokenizer_hash": fingerprint.tokenizer_hash, "weights_hash": fingerprint.weights_hash}
    )
    plain = sum(task.conversation.messages is None for task in tasks)
    warn_of_plain_text(plain, target.tokenizer, options.data)
    fitting = target.max_positions - 1  # one position is left for the reply
    longest = min(options.max_prompt_tokens or fitting, fitting)
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
        prompts = [prompt for prompt, _ in batch]
        seed = seed_of(options.sampling.seed, batch[0])
        replies = sample(target, prompts, options.sampling, seed)
        for (prompt, task), reply in zip(batch, replies, strict=True):
            ended = bool(reply) and reply[-1] in target.eos_ids
            text = target.tokenizer.decode(reply[:-1] if ended else reply)
            message = {"role": "assistant", "content": text}
            task.add_reply(prompt, reply, message, "stop" if ended else "length")
            # A reply that was cut short is not what the next message answers.
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
    """Remove from `waiting` the `size` shortest prompts or fewer, and return them.

    All prompts of a batch can have equally long replies within the target's `positions`. A batch is
    padded to its longest prompt, which would otherwise cut the others' replies short.
    """

    def reply_limit(prompt: list[int]) -> int:
        return min(max_new_tokens, positions - len(prompt))

    waiting.sort(key=lambda item: len(item[0]))
    limit = reply_limit(waiting[0][0])
    count = 1
    while count < min(size, len(waiting)) and reply_limit(waiting[count][0]) == limit:
        count += 1
    batch = waiting[:count]
    del waiting[:count]
    return batch


def seed_of(seed: int, first: tuple[list[int], Task]) -> int:
    """Return the seed of a batch, made from its first prompt.

    So a second call, which goes on with other batches, does not repeat the noise of the first.
    """
    return zlib.crc32(f"{seed} {first[1].id} {len(first[0])}".encode())


@torch.inference_mode()
def sample(
    target: Target, prompts: list[list[int]], sampling: ReplySampling, seed: int
) -> list[list[int]]:
    """Return one reply for each prompt, cut behind its end token.

    Runs `generate` of transformers on the prompts, padded on the left.
    """
    width = max(map(len, prompts))
    pad = next(iter(target.eos_ids), 0)  # any token will do: the mask hides it
    padded, masks = [], []
    for prompt in prompts:
        missing = width - len(prompt)
        padded.append([pad] * missing + prompt)
        masks.append([0] * missing + [1] * len(prompt))
    ids = torch.tensor(padded, device=target.device)
    mask = torch.tensor(masks, device=target.device)
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
    # are verified. The last value of each is the neutral one.
    options |= {name: PROCESSORS[name][-1] for name in target.processors}
    options |= {"pad_token_id": pad, "eos_token_id": sorted(target.eos_ids) or None}
    limit = min(sampling.max_new_tokens, target.max_positions - width)
    config = GenerationConfig(max_new_tokens=limit, **options)
    out = target.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    # Rows that end early are padded on the right.
    return [until_end(row, target.eos_ids) for row in out[:, width:].tolist()]


def until_end(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    """Return the tokens up to the first end token, that one included; all if there is none."""
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: i + 1]
    return tokens
