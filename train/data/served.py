"""Features from a running vLLM, started with its speculative method `extract_hidden_states`.

So a target that is quantised, split over GPUs or a mixture of experts gives the states that it
serves with, and this process holds only its embedding, final norm and head. The server writes one
file for each request, which this client reads and deletes: both need one file system.

vLLM's layer i is `hidden_states[i]` of Hugging Face, except for layer L, the number of layers: that
is the state before the final norm, and `hidden_states[L]` the one after it.

Shapes: S positions of a text, F layers that the server gives, Ht hidden size of the target.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from torch import Tensor

from ...heads.errors import UserError
from ...heads.files import JsonObject
from ...heads.vocabulary import spread_ids
from ...inference.console import Progress
from ...inference.targets.causal_model import Hidden
from ...inference.targets.stored import HeldOutText, StoredTarget
from ...inference.targets.target import TargetSource
from ..features import Features
from .batches import PADDING, Batch


@dataclass
class FeatureReply:
    """Reply of the server to one request."""

    ids: list[int]
    """Token ids of the prompt and of what was written."""
    states: Tensor
    """States `[S, F, Ht]` of the prompt (`Client.ask`), or of all tokens but the last
    (`Client.write`), at the layers that the server was started with, ascending."""


class Client:
    """Client of a server for hidden states: requests, and the files with their results."""

    def __init__(
        self, url: str, model: str, layers: list[int], concurrency: int, timeout_s: float = 600.0
    ) -> None:
        """`layers` are the ids that the server was started with, the number of layers among them.

        `concurrency` requests are under way at a time; `timeout_s` is the limit of each.
        """
        self.layers, self._model, self._timeout = layers, model, timeout_s
        self._http = httpx.Client(base_url=url.rstrip("/"), timeout=timeout_s)
        self._pool = ThreadPoolExecutor(concurrency)

    def ask(self, prompts: list[list[int]]) -> Iterator[FeatureReply]:
        """Yield the states of each prompt of token ids, in order, with requests running ahead.

        Raises `UserError`, as `write` does, for a server that does not answer as it should.
        """
        return self._pool.map(lambda ids: self._one(ids, 1), prompts)

    def write(self, prompts: list[list[int]], max_tokens: int) -> Iterator[FeatureReply]:
        """Yield a greedy reply of at most `max_tokens` to each prompt, with the states of both.

        States come from the pass that writes the reply, so the last token has none.
        """
        return self._pool.map(lambda ids: self._one(ids, max_tokens), prompts)

    def _one(self, ids: list[int], max_tokens: int) -> FeatureReply:
        """Make one request; see `ask` (`max_tokens` 1) and `write`. Raises `UserError`."""
        request: JsonObject = {
            "model": self._model, "prompt": ids, "max_tokens": max_tokens, "temperature": 0,
            "return_token_ids": True,
            "repetition_penalty": 1.0,
        }  # fmt: skip
        if max_tokens > 1:
            request["kv_transfer_params"] = {"include_output_tokens": True}
        try:
            answer = self._http.post("/completions", json=request)
        except httpx.HTTPError as error:
            raise UserError(
                f"server {self._http.base_url} does not answer ({error or type(error).__name__}); "
                "check it"
            ) from error
        if answer.status_code != 200:
            raise UserError(
                f"server {self._http.base_url} refuses {len(ids)} tokens ({answer.text[:200]}); "
                "check its limits"
            )
        try:
            body = answer.json()
            path = (body.get("kv_transfer_params") or {}).get("hidden_states_path")
            written = body["choices"][0]["token_ids"]
        except (ValueError, KeyError, IndexError, AttributeError) as error:
            raise UserError(
                f"server {self._http.base_url} answers in an unknown form ({error!r}); is it a "
                "vLLM?"
            ) from error
        if path is None:
            raise UserError(
                f"server {self._http.base_url} gives no hidden states; start it with the "
                "speculative method extract_hidden_states"
            )
        tensors = self._fetch(Path(path))
        read_ids = tensors["token_ids"].tolist()
        # A server that gives the states of prompts only: ask again, with the reply in the prompt.
        if read_ids == ids and max_tokens > 1 and len(written) > 1:
            return FeatureReply(ids + written, self._one((ids + written)[:-1], 1).states)
        if read_ids != (ids if max_tokens == 1 else (ids + written)[:-1]):
            raise UserError(
                f"server {self._http.base_url} sent the states of another text; use one prompt a "
                "request and no prefix"
            )
        return FeatureReply(ids + written, tensors["hidden_states"])

    def _fetch(self, path: Path) -> dict[str, Tensor]:
        """Return the tensors that the server has put into a file, and delete it.

        The server holds a lock on a second file while it writes; it deletes neither. Raises
        `UserError` for a file that cannot be read, is late, or holds something else.
        """
        lock = Path(f"{path}.lock")
        deadline = time.monotonic() + self._timeout
        try:
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
            # Into memory instead of mapped, since the file is deleted below.
            tensors = load_bytes(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"cannot read {path}, where the server put the states ({error}); run where that "
                "folder is to be seen"
            ) from error
        for file_to_delete in (path, lock):
            file_to_delete.unlink(missing_ok=True)
        if len(tensors["hidden_states"]) != len(tensors["token_ids"]):
            raise UserError(
                f"{path} has {len(tensors['hidden_states'])} states for "
                f"{len(tensors['token_ids'])} tokens; check the server"
            )
        if tensors["hidden_states"].shape[1] != len(self.layers):
            raise UserError(
                f"the server gives states of {tensors['hidden_states'].shape[1]} layers, "
                f"features.server_layers names {len(self.layers)}; name those that it was started "
                "with"
            )
        return tensors


class ServedTarget(StoredTarget):
    """Embedding, final norm and head of a target whose layers run in a server."""

    client: Client

    def hidden_of(self, states: Tensor, taps: tuple[int, ...]) -> Hidden:
        """Return last hidden state and taps of `states` `[S, F, Ht]` as the server gives them.

        The final norm is applied here.
        """
        index_of = {layer: i for i, layer in enumerate(self.client.layers)}
        states = states.to(self.device, self.dtype)
        norm: Any = self.final_norm()
        with torch.no_grad():
            return Hidden(
                norm(states[:, index_of[self.num_layers]]),
                tuple(states[:, index_of[tap]] for tap in taps),
            )

    def tap_sizes(self, taps: tuple[int, ...]) -> tuple[float, ...]:
        check_layers(self, taps, self.client.layers)
        # One position less than `Target.tap_sizes` may take: the server writes a token too.
        ids = spread_ids(self.vocab_size, min(128, self.max_positions - 1)).tolist()
        hidden = self.hidden_of(next(self.client.ask([ids])).states, taps)
        return tuple(float(tap.float().square().mean(-1).sqrt().median()) for tap in hidden.taps)

    def tap_sample(self, ids: list[int], taps: tuple[int, ...]) -> tuple[Tensor, ...]:
        check_layers(self, taps, self.client.layers)
        hidden = self.hidden_of(next(self.client.ask([ids])).states, taps)
        return tuple(tap.float() for tap in hidden.taps)


class ServedFeatures:
    """Source of features that asks a server, with a request for each document of a batch."""

    def __init__(self, target: ServedTarget, taps: tuple[int, ...]) -> None:
        check_layers(target, taps, target.client.layers)
        self._target, self._taps = target, taps

    def features(self, batch: Batch) -> Features:
        """Return a batch with the server's states; those of padding are 0. Raises `UserError`."""
        target = self._target
        spans: list[tuple[int, slice]] = []  # row of each document, and its positions there
        for row in range(len(batch.ids)):
            for document in batch.documents[row].unique().tolist():
                if document != PADDING:
                    positions = (batch.documents[row] == document).nonzero()[:, 0]
                    spans.append((row, slice(int(positions[0]), int(positions[-1]) + 1)))
        replies = target.client.ask([batch.ids[row, span].tolist() for row, span in spans])

        def zeros():
            return torch.zeros(
                *batch.ids.shape, target.hidden_size, dtype=target.dtype, device=target.device
            )

        last, taps = zeros(), tuple(zeros() for _ in self._taps)
        for (row, span), reply in zip(spans, replies, strict=True):
            hidden = target.hidden_of(reply.states, self._taps)
            last[row, span] = hidden.last
            for tap, states in zip(taps, hidden.taps, strict=True):
                tap[row, span] = states
        return Features(batch, last, taps)

    def finish(self) -> None: ...


def check_layers(target: TargetSource, taps: tuple[int, ...], layers: list[int]) -> None:
    """Raise `UserError` unless the server's `layers` are in order and hold all that is needed.

    vLLM would change ids that are not ascending and distinct without a message.
    """
    if (
        layers != sorted(set(layers))
        or not layers
        or not 0 <= layers[0] <= layers[-1] <= target.num_layers
    ):
        raise UserError(
            f"features.server_layers {layers} must be ascending, distinct and at most "
            f"{target.num_layers}"
        )
    if missing := sorted({*taps, target.num_layers} - set(layers)):
        raise UserError(
            f"this run needs layers {missing} of the server too (the last one is the state before "
            f"the final norm); start it with {sorted({*taps, target.num_layers})} and name them in "
            "features.server_layers"
        )


def served_texts(
    target: ServedTarget, prompts: list[list[int]], taps: tuple[int, ...], max_new_tokens: int
) -> list[HeldOutText]:
    """Return the server's greedy replies to prompts, with the features of both, on the CPU."""
    replies = target.client.write(prompts, max_new_tokens)
    texts = []
    for prompt, reply in zip(
        Progress(prompts, desc="server writes held-out replies"), replies, strict=True
    ):
        hidden = target.hidden_of(reply.states, taps)
        # The last token has no state, and none is read, since nothing is drafted behind it. The
        # state before it stands in, so that there is one for each token.
        last, *tapped = (
            torch.cat([states, states[-1:]]).cpu() for states in (hidden.last, *hidden.taps)
        )
        texts.append(HeldOutText(reply.ids, len(prompt), Hidden(last, tuple(tapped))))
    return texts
