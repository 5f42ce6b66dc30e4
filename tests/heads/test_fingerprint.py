"""The fingerprint of a target: which elements of its tensors it reads, at every size."""

from __future__ import annotations

from pathlib import Path

import torch
from draftsmith.heads.fingerprint import LARGEST_EXACT, hash_of, sampled_places
from draftsmith.inference.settings import TargetConfig
from draftsmith.inference.targets.target import load_target
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
SMOLLM2_EMBEDDING = 49152 * 576
LLAMA_70B_EMBEDDING = 128256 * 8192
QWEN3_32B_EMBEDDING = 151936 * 5120


def test_sampled_places_can_be_checked_by_eye() -> None:
    assert sampled_places(1) == [0]
    assert sampled_places(4) == [0, 1, 2, 3]
    assert sampled_places(32) == list(range(32))
    assert sampled_places(311) == [10 * i for i in range(32)]
    assert sampled_places(31 * 2**27 + 1) == [i * 2**27 for i in range(32)]


@given(
    st.integers(1, 1 << 40)
    | st.sampled_from([LARGEST_EXACT, LARGEST_EXACT + 1, 1 << 31, SMOLLM2_EMBEDDING])
)
def test_sampled_places_are_distinct_and_span_a_tensor_of_any_size(size: int) -> None:
    places = sampled_places(size)
    assert len(places) == min(size, 32)
    assert places == sorted(set(places))
    assert places[0] == 0 and places[-1] == size - 1


@given(st.integers(1, LARGEST_EXACT))
def test_fingerprints_stored_before_stay_valid(size: int) -> None:
    """They were made with float32 `torch.linspace`, whose numbers are those of this reference: an
    exact product, rounded once."""
    count, last = min(size, 32), size - 1
    step = float(torch.tensor(float(last)) / torch.tensor(float(max(count - 1, 1))))
    exact = [step * i if i < count // 2 else last - step * (count - 1 - i) for i in range(count)]
    assert sampled_places(size) == torch.tensor(exact, dtype=torch.float64).float().long().tolist()


def test_the_quickstart_targets_fingerprint_is_the_one_its_committed_drafters_name() -> None:
    target = load_target(
        TargetConfig(str(ROOT / "scripts" / "quickstart" / "target"), device="cpu")
    )
    named = (
        ROOT / "scripts" / "quickstart" / "drafters" / "eagle3" / "draftsmith.json"
    ).read_text()
    assert target.fingerprint().weights_hash in named


def mapped(folder: Path, size: int) -> torch.Tensor:
    """A tensor of `size` zeros in bfloat16 in a file that takes no room on disk until it is written
    to."""
    path = folder / "weights.bin"
    with path.open("wb") as file:
        file.truncate(2 * size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)


def test_a_tensor_of_more_elements_than_int32_can_count_is_fingerprinted(tmp_path: Path) -> None:
    size = 577 * ((1 << 31) // 577 + 64)
    tensor = mapped(tmp_path, size).view(577, -1)
    before = hash_of(["embedding"], {"embedding": tensor}.get)
    tensor[-1, -1] = 1.0
    last = hash_of(["embedding"], {"embedding": tensor}.get)
    tensor[-1, -1], tensor.view(-1)[sampled_places(size)[20]] = 0.0, 1.0
    middle = hash_of(["embedding"], {"embedding": tensor}.get)
    assert len({before, last, middle}) == 3


def test_embeddings_of_models_in_use_are_fingerprinted(tmp_path: Path) -> None:
    for size in (SMOLLM2_EMBEDDING, QWEN3_32B_EMBEDDING, LLAMA_70B_EMBEDDING):
        tensor = mapped(tmp_path, size)
        before = hash_of(["embedding"], {"embedding": tensor}.get)
        tensor[-1] = 1.0
        assert hash_of(["embedding"], {"embedding": tensor}.get) != before
