"""Files of hidden states that a server names: read and deleted if they hold the states of the text,
refused in one line and kept otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from draftsmith.heads.errors import UserError
from draftsmith.inference.targets.stored import HeldOutPrompt, embedding_and_head_in
from draftsmith.inference.targets.target import Target
from draftsmith.train.data.config import Evaluation
from draftsmith.train.data.served import Client, FeatureReply, ServedTarget, served_texts
from tests.helpers.serving import serving, whole

IDS, REPLY, LAYERS, WIDTH = [5, 6, 7], [9], [2, 8], 4
STATES = torch.arange(3 * 2 * WIDTH).reshape(3, 2, WIDTH).float()
SOUND = {"token_ids": torch.tensor(IDS), "hidden_states": STATES}
Tensors = dict[str, torch.Tensor]


def named(folder: Path, tensors: Tensors) -> Path:
    """A file of the server, with the lock file that it leaves."""
    path = folder / "cmpl-1.safetensors"
    save_file(tensors, path)
    Path(f"{path}.lock").touch()
    return path


def ask(path: Any, **more: Any) -> torch.Tensor:
    """The states that a client gets from a server that answers with `path`."""
    body = {
        "choices": [{"token_ids": REPLY}],
        "kv_transfer_params": {"hidden_states_path": str(path)},
        **more,
    }
    with serving(whole(json.dumps(body).encode())) as url:
        client = Client(url, "target", LAYERS, 2.0)
        client.hidden_size = WIDTH
        return next(iter(client.ask([IDS]))).states


def test_the_states_of_the_text_are_taken_and_their_files_deleted(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        path = named(tmp_path, SOUND | {"hidden_states": STATES.to(dtype)})
        assert torch.equal(ask(path), STATES.to(dtype))
        assert not list(tmp_path.iterdir())


def test_a_reply_comes_with_the_states_of_all_tokens_but_the_last(tmp_path: Path) -> None:
    """The prompt's states come with the reply, those of both from a second request."""
    longer = {
        "token_ids": torch.tensor([*IDS, 9]),
        "hidden_states": torch.cat([STATES, STATES[:1]]),
    }
    client = Client("http://localhost:1", "target", LAYERS)
    asked: list[list[int]] = []

    def fetch(path: Path, text: list[int]) -> torch.Tensor:
        asked.append(text)
        return longer["hidden_states"][: len(text)]

    client._fetch = fetch  # type: ignore[method-assign]
    body = {
        "choices": [{"token_ids": [9, 11]}],
        "kv_transfer_params": {"hidden_states_path": str(tmp_path / "x")},
    }
    with serving(whole(json.dumps(body).encode())) as url:
        client._http.base_url = url
        (reply,) = client.write([IDS], 4)
    assert asked == [IDS, [*IDS, 9]] and reply.ids == [*IDS, 9, 11]
    assert torch.equal(reply.states, longer["hidden_states"])


WRONG: dict[str, tuple[Tensors, str]] = {
    "a model": ({"model.norm.weight": torch.ones(4)}, "holds model.norm.weight and not token_ids"),
    "no states": ({"token_ids": torch.tensor(IDS)}, "holds token_ids and not"),
    "one tensor more": (SOUND | {"x": torch.ones(1)}, "and not token_ids and hidden_states"),
    "another text": (SOUND | {"token_ids": torch.tensor([5, 6, 8])}, "states of another text"),
    "a shorter text": ({name: t[:2].clone() for name, t in SOUND.items()}, "has states"),
    "fewer states": (SOUND | {"hidden_states": STATES[:2].clone()}, "for token ids"),
    "another width": (SOUND | {"hidden_states": torch.ones(3, 2, 5)}, "has states"),
    "another number of layers": (
        SOUND | {"hidden_states": torch.ones(3, 3, 4)},
        "server_layers names",
    ),
    "states without layers": (SOUND | {"hidden_states": torch.ones(3, 8)}, "has states"),
    "whole numbers": (SOUND | {"hidden_states": STATES.int()}, "states of type I32"),
    "ids that are floats": (SOUND | {"token_ids": torch.tensor(IDS).float()}, "ids of type F32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_of_something_else_is_named_and_stays(case: str, tmp_path: Path) -> None:
    tensors, says = WRONG[case]
    path = named(tmp_path, tensors)
    before = path.read_bytes()
    with pytest.raises(UserError, match=says):
        ask(path)
    assert path.read_bytes() == before and Path(f"{path}.lock").exists()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: path.write_bytes(save(SOUND)[:-3]),
    "too long": lambda path: path.write_bytes(save(SOUND) + b"more"),
    "empty": lambda path: path.write_bytes(b""),
    "no safetensors": lambda path: path.write_bytes(b"private key"),
    "a pipe": pipe,
    "a link": link,
    "no lock": lambda path: Path(f"{path}.lock").unlink(),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_or_missing_state_file_is_refused_and_kept(case: str, tmp_path: Path) -> None:
    path = named(tmp_path, SOUND)
    DAMAGE[case](path)
    left = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"cannot (read|load) .*cmpl-1.safetensors"):
        ask(path)
    assert sorted(tmp_path.iterdir()) == left


@pytest.mark.parametrize(
    "more",
    [
        {"choices": [{"token_ids": "abc"}]},
        {"choices": [{"token_ids": []}]},
        {"choices": [{"token_ids": [10**12]}]},
        {"choices": 3},
        {"kv_transfer_params": []},
        {"kv_transfer_params": {"hidden_states_path": ["x"]}},
        {"kv_transfer_params": {"hidden_states_path": "a\0b"}},
        {"kv_transfer_params": None},
    ],
)
def test_unexpected_server_answer_is_refused_in_one_line(
    more: dict[str, Any], tmp_path: Path
) -> None:
    path = named(tmp_path, SOUND)
    with pytest.raises(UserError, match="unknown form|gives no hidden states|cannot read"):
        ask(path, **more)
    assert path.exists()


class Answers(Client):
    """Answers of a server with the states of `live`, and another reply at each request."""

    def __init__(self, live: Target, layers: list[int]) -> None:
        self.layers, self._live, self.written = layers, live, 0

    def ask(self, prompts: list[list[int]]) -> Iterator[FeatureReply]:
        for ids in prompts:
            inputs: list[torch.Tensor] = []  # of the final norm: layer L, as vLLM counts
            norm: Any = self._live.model.model.norm  # type: ignore[union-attr]
            hook = norm.register_forward_pre_hook(lambda _, given, to=inputs: to.append(given[0]))
            taps = self._live.forward(torch.tensor([ids]), taps=(*self.layers[:-1],)).taps
            hook.remove()
            yield FeatureReply(ids, torch.stack([*(tap[0] for tap in taps), inputs[0][0]], 1))

    def write(
        self, prompts: list[list[int]], max_tokens: int, temperature: float = 0.0
    ) -> Iterator[FeatureReply]:
        for ids in prompts:
            self.written += 1
            text = ids + [7 + (self.written + i) % 50 for i in range(max_tokens)]
            (reply,) = self.ask([text[:-1]])
            yield FeatureReply(text, reply.states)


def test_a_run_that_resumes_is_measured_on_the_same_replies(
    tmp_path: Path, tiny: Target, saved_tiny: Path
) -> None:
    """The replies are in a file, and their features are asked for again; another length, other
    prompts or a damaged file let the server write."""
    served = embedding_and_head_in(str(saved_tiny), ServedTarget)
    served.client = answers = Answers(tiny, [1, tiny.num_layers])
    prompts = [HeldOutPrompt([3, 4, 5], 0), HeldOutPrompt([6, 7], 1)]
    file, config = tmp_path / "replies.json", Evaluation(max_new_tokens=6, temperature=0.7)
    first = served_texts(served, prompts, (1,), config, file)
    again = served_texts(served, prompts, (1,), config, file)
    assert answers.written == 2 and [len(text.ids) for text in first] == [9, 8]
    for one, other in zip(first, again, strict=True):
        assert (one.ids, one.start, one.unit) == (other.ids, other.start, other.unit)
        assert torch.equal(one.hidden.last, other.hidden.last)
        assert torch.equal(one.hidden.taps[0], other.hidden.taps[0])
        live = tiny.forward(torch.tensor([one.ids]), taps=(1,))
        torch.testing.assert_close(one.hidden.last[:-1], live.last[0, :-1])
    longer = replace(config, max_new_tokens=7)
    assert len(served_texts(served, prompts, (1,), longer, file)[0].ids) == 10
    served_texts(served, prompts[:1], (1,), longer, file)
    assert answers.written == 5
    file.write_text(file.read_text()[:-9])
    served_texts(served, prompts[:1], (1,), longer, file)
    assert answers.written == 6
