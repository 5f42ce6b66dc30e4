"""Features from a vLLM server with the speculative method `extract_hidden_states`.

The states are those of the target as it is served: quantised, split over GPUs or a mixture of
experts. This process holds only the target's embedding, final norm and head. The server writes a
file for each request, which this client reads and deletes: both need one file system.

vLLM's layer i is `hidden_states[i]` of Hugging Face, except for layer L, the number of layers: that
is the state before the final norm, and `hidden_states[L]` the one after it.

Shapes: S positions of a text, F layers of the server, Ht hidden size of the target.
"""

from __future__ import annotations

import fcntl
import json
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import torch
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...heads.documents import Token, convert
from ...heads.errors import UserError, first_line
from ...heads.files import JsonObject, whole_file
from ...heads.stored_tensors import header
from ...heads.vocabulary import spread_ids
from ...inference.base.console import ProgressReporter
from ...inference.base.settings import SERVER_KEY_VARIABLE, headers_with_key
from ...inference.rounds.outcome import Hidden
from ...inference.targets.stored import HeldOutPrompt, HeldOutText, StoredTarget
from ...inference.targets.target import TargetSource
from .batches import PADDING, Batch
from .config import Evaluation
from .features import Features

REQUESTS = 32  # concurrent requests of each rank: a server queues what it cannot run at once
NAMES = ("token_ids", "hidden_states")  # of the tensors in a server's file
ID_TYPES = ("I64", "I32")  # as safetensors names them
STATE_TYPES = ("F32", "BF16", "F16")


class _Choice(Struct):
    """Text that the server wrote."""

    token_ids: Annotated[list[Token], Meta(min_length=1)]


class _TransferParams(Struct):
    """Message of vLLM's connector about the states."""

    hidden_states_path: Annotated[str, Meta(pattern=r"^[^\0]+$")] | None = None


class _Completion(Struct):
    """Answer of the server to one request; only these fields are read."""

    choices: Annotated[list[_Choice], Meta(min_length=1)]
    kv_transfer_params: _TransferParams | None = None


@dataclass
class FeatureReply:
    """Reply of the server to one request."""

    ids: list[int]
    """Token ids of the prompt and the reply."""
    states: Tensor
    """States `[S, F, Ht]` of the prompt (`Client.ask`), or of all tokens but the last
    (`Client.write`), at the server's layers, ascending."""


class Client:
    """Client of a server for hidden states: requests, and the files with their results."""

    def __init__(
        self,
        url: str,
        model: str,
        layers: list[int],
        timeout_s: float = 600.0,
        hidden_size: int | None = None,
    ) -> None:
        """`layers` are the ids that the server was started with, the number of layers among them.

        `timeout_s` is the limit of a request, `hidden_size` the expected size of states, if known.
        """
        self.layers, self._model, self._timeout = layers, model, timeout_s
        self.hidden_size = hidden_size
        headers = headers_with_key()
        self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout_s)
        self._pool = ThreadPoolExecutor(REQUESTS)

    def ask(self, prompts: list[list[int]]) -> Iterator[FeatureReply]:
        """Yield the states of each prompt of token ids, in order, with requests running ahead.

        Raises `UserError`, as `write` does, if the server does not answer as expected.
        """
        return self._pool.map(lambda ids: self._one(ids, 1), prompts)

    def write(
        self, prompts: list[list[int]], max_tokens: int, temperature: float = 0.0
    ) -> Iterator[FeatureReply]:
        """Yield a reply of at most `max_tokens` to each prompt, with the states of both.

        The last token has no state, since nothing is drafted after it.
        """
        numbers = range(len(prompts))
        return self._pool.map(
            lambda ids, number: self._one(ids, max_tokens, temperature, number), prompts, numbers
        )

    def _one(
        self, ids: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> FeatureReply:
        """Make one request; see `ask` (`max_tokens` 1) and `write`. Raises `UserError`."""
        request: JsonObject = {
            "model": self._model, "prompt": ids, "max_tokens": max_tokens,
            "temperature": temperature, "return_token_ids": True, "repetition_penalty": 1.0,
        }  # fmt: skip
        if temperature:  # the server would take missing settings from the model's own
            request |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": seed}
        try:
            answer = self._http.post("/completions", json=request)
        except httpx.HTTPError as error:
            raise self._error(
                f"does not answer ({error or type(error).__name__}); check it"
            ) from error
        if answer.status_code != 200:
            raise self._error(
                f"refuses {len(ids)} tokens with status {answer.status_code} "
                f"({answer.text[:200]}); check its limits, and the key in {SERVER_KEY_VARIABLE}"
            )
        try:
            reply = convert(answer.json(), _Completion)
        except (ValueError, RecursionError) as error:
            raise self._error(
                f"answers in an unknown form ({first_line(error)}); is it a vLLM?"
            ) from error
        path = (reply.kv_transfer_params or _TransferParams()).hidden_states_path
        if path is None:
            raise self._error(
                "gives no hidden states; start it with the speculative method extract_hidden_states"
            )
        text, states = ids + reply.choices[0].token_ids, self._fetch(Path(path), ids)
        if max_tokens > 1:
            # A server gives the states of prompts only, so it is asked again with the reply.
            states = self._one(text[:-1], 1).states
        return FeatureReply(text, states)

    def _error(self, what: str) -> UserError:
        return UserError(f"server {self._http.base_url} {what}")

    def _fetch(self, path: Path, text: list[int]) -> Tensor:
        """Return the states `[S, F, Ht]` in a file of the server, and delete the file.

        The server may name any file, so it is read only if its header fits, and deleted only if it
        holds the states of `text`, a list of token ids. The server holds a lock on a second file
        while it writes, and deletes neither. Raises `UserError` for a file that cannot be read, is
        late, or holds something else; such a file stays.
        """
        lock = Path(f"{path}.lock")
        deadline = time.monotonic() + self._timeout
        try:
            # Opening a pipe would wait for its writer.
            for file in (path, lock):
                if not stat.S_ISREG(file.lstat().st_mode):
                    raise OSError(f"{file} is not a regular file")
            with lock.open("rb") as file:
                while True:
                    try:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if time.monotonic() > deadline:
                            raise UserError(
                                f"{path} was not written within {self._timeout:.0f} s; check the "
                                "server"
                            ) from None
                        time.sleep(0.001)
            self._check_header(path, len(text))
            with safe_open(path, framework="pt") as opened:
                # Copied instead of mapped, since the file is deleted below.
                tensors = {name: opened.get_tensor(name).clone() for name in NAMES}
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"cannot read {path}, where the server put the states ({error}); run on a machine "
                "that has this folder"
            ) from error
        if tensors["token_ids"].tolist() != text:
            raise self._error(
                f"sent the states of another text in {path}; use one prompt a request and no prefix"
            )
        for read in (path, lock):
            read.unlink(missing_ok=True)
        return tensors["hidden_states"]

    def _check_header(self, path: Path, positions: int) -> None:
        """Raise `UserError` unless a file's header is that of states of `positions` positions."""
        found = header(path)
        names, says = ", ".join(sorted(found)[:3]), ""
        if found.keys() != set(NAMES):
            says = f"holds {names} and not {' and '.join(NAMES)}"
        else:
            ids, states = (found[name] for name in NAMES)
            wanted = [positions, len(self.layers), self.hidden_size or states.shape[-1]]
            if [*states.shape] != wanted or [*ids.shape] != wanted[:1]:
                says = f"has states {states.shape} for token ids {ids.shape}, not {wanted}"
            elif ids.dtype not in ID_TYPES or states.dtype not in STATE_TYPES:
                says = f"has token ids of type {ids.dtype} and states of type {states.dtype}"
        if says:
            raise UserError(
                f"{path}, which the server names, {says}; check the server, and that "
                "features.server_layers names the layers that it was started with"
            )


class ServedTarget(StoredTarget):
    """Embedding, final norm and head of a target whose layers run in a server."""

    client: Client

    def hidden_of(self, states: Tensor, taps: tuple[int, ...]) -> Hidden:
        """Return last hidden state, after the final norm, and taps of states `[S, F, Ht]`."""
        index_of = {layer: i for i, layer in enumerate(self.client.layers)}
        states = states.to(self.device, self.dtype)
        norm: Any = self.final_norm()
        with torch.no_grad():
            last = norm(states[:, index_of[self.num_layers]])
        return Hidden(last, tuple(states[:, index_of[tap]] for tap in taps))

    def tap_sizes(self, taps: tuple[int, ...]) -> tuple[float, ...]:
        # One position less than in `Target.tap_sizes`, since the server also writes a token.
        ids = spread_ids(self.vocab_size, min(128, self.max_positions - 1)).tolist()
        sample = self.tap_sample(ids, taps)
        return tuple(float(tap.square().mean(-1).sqrt().median()) for tap in sample)

    def tap_sample(self, ids: list[int], taps: tuple[int, ...]) -> tuple[Tensor, ...]:
        check_layers(self, taps, self.client.layers)
        hidden = self.hidden_of(next(self.client.ask([ids])).states, taps)
        return tuple(tap.float() for tap in hidden.taps)


class ServedFeatures:
    """Source of features from a server, with a request for each document of a batch."""

    def __init__(self, target: ServedTarget, taps: tuple[int, ...]) -> None:
        check_layers(target, taps, target.client.layers)
        self._target, self._taps = target, taps

    def features(self, batch: Batch) -> Features:
        """Return a batch with the server's states, which are 0 at padding. Raises `UserError`."""
        target = self._target
        spans: list[tuple[int, slice]] = []  # row of each document, and its positions there
        for row in range(len(batch.ids)):
            for document in batch.documents[row].unique().tolist():
                if document != PADDING:
                    positions = (batch.documents[row] == document).nonzero()[:, 0]
                    spans.append((row, slice(int(positions[0]), int(positions[-1]) + 1)))
        replies = target.client.ask([batch.ids[row, span].tolist() for row, span in spans])
        shape = (1 + len(self._taps), *batch.ids.shape, target.hidden_size)
        last, *taps = torch.zeros(shape, dtype=target.dtype, device=target.device)
        for (row, span), reply in zip(spans, replies, strict=True):
            hidden = target.hidden_of(reply.states, self._taps)
            last[row, span] = hidden.last
            for tap, states in zip(taps, hidden.taps, strict=True):
                tap[row, span] = states
        return Features(batch, last, tuple(taps))

    def finish(self) -> None: ...


def check_layers(target: TargetSource, taps: tuple[int, ...], layers: list[int]) -> None:
    """Raise `UserError` unless the server's `layers` are in order and include those of the run.

    vLLM silently changes ids that are not ascending and distinct.
    """
    last, needed = target.num_layers, sorted({*taps, target.num_layers})
    if layers != sorted(set(layers)) or not {*needed} <= {*layers} <= {*range(last + 1)}:
        raise UserError(
            f"features.server_layers {layers} must be ascending and distinct, at most {last}, and "
            f"hold {needed}, which this run reads (the last one is the state before the final "
            "norm); start the server with these"
        )


def served_texts(
    target: ServedTarget,
    prompts: list[HeldOutPrompt],
    taps: tuple[int, ...],
    config: Evaluation,
    file: Path | None = None,
) -> list[HeldOutText]:
    """Return the server's replies to prompts, with the features of both, on the CPU.

    The replies are kept in `file`, so that a resumed run is measured on the same ones: the server
    may write others, at a temperature or in another batch.
    """
    ids = [prompt.token_ids for prompt in prompts]
    settings: JsonObject = {
        "target": target.fingerprint().weights_hash, "prompts": ids,
        "max_new_tokens": config.max_new_tokens, "temperature": config.temperature,
    }  # fmt: skip
    kept = _kept_replies(file, settings)
    if kept is None:
        replies = target.client.write(ids, config.max_new_tokens, config.temperature)
    else:
        # Without the last token, as in the states of `write`.
        replies = target.client.ask([text[:-1] for text in kept])
    texts = []
    for i, reply in enumerate(
        ProgressReporter(replies, total=len(prompts), desc="server writes held-out replies")
    ):
        hidden = target.hidden_of(reply.states, taps)
        # The last token's state is missing and never read. The one before it is repeated, so that
        # each token has a state.
        last, *tapped = (
            torch.cat([states, states[-1:]]).cpu() for states in (hidden.last, *hidden.taps)
        )
        text = reply.ids if kept is None else kept[i]
        hidden = Hidden(last, tuple(tapped))
        texts.append(HeldOutText(text, len(ids[i]), hidden, prompts[i].unit))
    if file is not None and kept is None:
        with whole_file(file) as aside:
            aside.write_text(json.dumps({**settings, "texts": [text.ids for text in texts]}))
    return texts


def _kept_replies(file: Path | None, settings: JsonObject) -> list[list[int]] | None:
    """Return the texts in `file` if they were written with the same `settings`, else None."""
    try:
        found = None if file is None else json.loads(file.read_text())
        texts = convert(found.pop("texts"), list[list[Token]]) if found else None
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return texts if found == settings else None
