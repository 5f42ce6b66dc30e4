"""Features from a running vLLM that was started to give them (its method `extract_hidden_states`).

So a target that is quantised, split over GPUs or a mixture of experts teaches with the states that
it serves with, and this process holds its embedding, final norm and head only. The server writes
one file a request, which this client reads and deletes: both need one file system. Layer i of vLLM
is `hidden_states[i]`, but L, the number of layers, is the state before the final norm.
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
from ...heads.vocabulary import spread_ids
from ...inference.console import Progress
from ...inference.stored import HeldOutText, StoredTarget
from ...inference.target import Hidden, Target
from ..features import Features
from .batches import PADDING, Batch


@dataclass
class FeatureReply:
    """What the server says to one request."""

    ids: list[int]
    """The prompt, and what was written."""
    states: Tensor
    """[N, K, H]: states of the prompt's N tokens, or of all N tokens but the last, at the K layers
    that the server was started with, ascending."""


class Client:
    """Requests for hidden states, and the files that they end up in."""

    def __init__(
        self, url: str, model: str, layers: list[int], concurrency: int, timeout_s: float = 600.0
    ) -> None:
        """`layers`: the ids that the server was started with, the number of the target's layers
        among them."""
        self.layers, self._model, self._timeout = layers, model, timeout_s
        self._http = httpx.Client(base_url=url.rstrip("/"), timeout=timeout_s)
        self._pool = ThreadPoolExecutor(concurrency)

    def ask(self, prompts: list[list[int]]) -> Iterator[FeatureReply]:
        """Prompts of token ids -> their states, many at a time."""
        return self._pool.map(lambda ids: self._one(ids, 1), prompts)

    def write(self, prompts: list[list[int]], max_tokens: int) -> Iterator[FeatureReply]:
        """Prompts of token ids -> greedy replies of at most `max_tokens`, and the states of both in
        the same pass: of all tokens but the last, which had none yet when it was written."""
        return self._pool.map(lambda ids: self._one(ids, max_tokens), prompts)

    def _one(self, ids: list[int], max_tokens: int) -> FeatureReply:
        request: dict[str, Any] = {
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
        found = self._fetch(Path(path))
        # a server that knows prompts only
        if found["token_ids"].tolist() == ids and max_tokens > 1 and len(written) > 1:
            return FeatureReply(ids + written, self._one((ids + written)[:-1], 1).states)
        if found["token_ids"].tolist() != (ids if max_tokens == 1 else (ids + written)[:-1]):
            raise UserError(
                f"server {self._http.base_url} sent the states of another text; use one prompt a "
                "request and no prefix"
            )
        return FeatureReply(ids + written, found["hidden_states"])

    def _fetch(self, path: Path) -> dict[str, Tensor]:
        """Wait for the writer, who holds a lock; then read and delete: the server itself deletes
        nothing."""
        lock = Path(f"{path}.lock")
        until = time.monotonic() + self._timeout
        try:
            with lock.open("rb") as file:
                while True:
                    try:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if time.monotonic() > until:
                            raise UserError(
                                f"{path} was not written within {self._timeout:.0f} s; check the "
                                "server"
                            ) from None
                        time.sleep(0.001)
            found = load_bytes(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"cannot read {path}, where the server put the states ({error}); run where that "
                "folder is to be seen"
            ) from error
        for done in (path, lock):
            done.unlink(missing_ok=True)
        if len(found["hidden_states"]) != len(found["token_ids"]):
            raise UserError(
                f"{path} has {len(found['hidden_states'])} states for {len(found['token_ids'])} "
                "tokens; check the server"
            )
        if found["hidden_states"].shape[1] != len(self.layers):
            raise UserError(
                f"the server gives states of {found['hidden_states'].shape[1]} layers, "
                "features.server_layers names "
                f"{len(self.layers)}; name those that it was started with"
            )
        return found


class ServedTarget(StoredTarget):
    """The ends of a target that runs elsewhere."""

    client: Client

    def hidden_of(self, states: Tensor, taps: tuple[int, ...]) -> Hidden:
        """`[N, K, H]` as the server gives them -> last state after the final norm, which is applied
        here, and taps."""
        place = {layer: i for i, layer in enumerate(self.client.layers)}
        states = states.to(self.device, self.dtype)
        norm: Any = self.final_norm()
        with torch.no_grad():
            return Hidden(
                norm(states[:, place[self.num_layers]]),
                tuple(states[:, place[tap]] for tap in taps),
            )

    def tap_sizes(self, taps: tuple[int, ...]) -> tuple[float, ...]:
        check_layers(self, taps, self.client.layers)
        ids = spread_ids(self.vocab_size, min(128, self.max_positions - 1)).tolist()
        found = self.hidden_of(next(self.client.ask([ids])).states, taps)
        return tuple(float(tap.float().square().mean(-1).sqrt().median()) for tap in found.taps)

    def tap_sample(self, ids: list[int], taps: tuple[int, ...]) -> tuple[Tensor, ...]:
        check_layers(self, taps, self.client.layers)
        return tuple(
            tap.float() for tap in self.hidden_of(next(self.client.ask([ids])).states, taps).taps
        )


class ServedFeatures:
    """Features of packed rows: every document is a request of its own."""

    def __init__(self, target: ServedTarget, taps: tuple[int, ...]) -> None:
        check_layers(target, taps, target.client.layers)
        self._target, self._taps = target, taps

    def features(self, batch: Batch) -> Features:
        target = self._target
        places = [
            (row, (batch.documents[row] == document).nonzero()[:, 0])
            for row in range(len(batch.ids))
            for document in batch.documents[row].unique().tolist()
            if document != PADDING
        ]
        replies = target.client.ask([batch.ids[row, where].tolist() for row, where in places])

        def make():
            return torch.zeros(
                *batch.ids.shape, target.hidden_size, dtype=target.dtype, device=target.device
            )

        last, taps = make(), tuple(make() for _ in self._taps)
        for (row, where), reply in zip(places, replies, strict=True):
            hidden, span = (
                target.hidden_of(reply.states, self._taps),
                slice(int(where[0]), int(where[-1]) + 1),
            )
            last[row, span] = hidden.last
            for into, found in zip(taps, hidden.taps, strict=True):
                into[row, span] = found
        return Features(batch, last, taps)

    def finish(self) -> None: ...


def check_layers(target: Target, taps: tuple[int, ...], layers: list[int]) -> None:
    """Demand layer ids that vLLM does not silently change, and that hold all that is needed."""
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
            "the final norm); start it with "
            f"{sorted({*taps, target.num_layers})} and name them in features.server_layers"
        )


def served_texts(
    target: ServedTarget, prompts: list[list[int]], taps: tuple[int, ...], max_new_tokens: int
) -> list[HeldOutText]:
    """The server's greedy replies to prompts, with the features of both."""
    replies = target.client.write(prompts, max_new_tokens)
    texts = []
    for prompt, reply in zip(
        Progress(prompts, desc="server writes held-out replies"), replies, strict=True
    ):
        hidden = target.hidden_of(reply.states, taps)
        # Nothing is drafted behind the last token: its row, which is not there, repeats the one
        # before.
        last, *tapped = (
            torch.cat([states, states[-1:]]).cpu() for states in (hidden.last, *hidden.taps)
        )
        texts.append(HeldOutText(reply.ids, len(prompt), Hidden(last, tuple(tapped))))
    return texts
