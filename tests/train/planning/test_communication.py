"""Communication of a step by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftsmith.train.planning.communication import Network, Step, limits, seconds, sent

STEP = Step(
    drafter_params=1000, trained_params=1000, target_params=8000, target_layers=3, hidden=10,
    positions=100, passes=2, rows=16, seconds=1.0,
)  # fmt: skip


def test_frozen_weights_have_no_gradients_to_send() -> None:
    """100 of 1,000 weights learn; FSDP2 and ZeRO-3 still gather all of them."""
    some = sent(replace(STEP, trained_params=100), 2)
    assert some["DDP"] == 2 * 200 and some["ZeRO-2"] == 2 * 200 + 200
    assert some["FSDP2"] == 2 * 2 * 2000 + 200 and some["ZeRO-3"] == 2 * (2 * 2000 + 200)


def test_bytes_of_two_gpus_by_hand() -> None:
    """Half of 4,000 bytes of drafter is 2,000 for each collective; the target has 16,000 bytes.

    With tensor: 2 micro-batches of both GPUs, 3 layers, 2 all-reduces, each twice half of 100 x 10
    states of 2 bytes.
    """
    assert sent(STEP, 2) == {
        "DDP": 2 * 2000,
        "FSDP2": 2 * 2 * 2000 + 2000,
        "ZeRO-2": 2 * 2000 + 2000,
        "ZeRO-3": 2 * 3 * 2000,
        "target.spread fsdp": 2 * 8000,
        "target.spread tensor": 2 * 2 * 3 * 2 * 2 * 1000,
    }
    assert {*sent(replace(STEP, live=False), 2)} == {"DDP", "FSDP2", "ZeRO-2", "ZeRO-3"}


def test_a_node_is_left_through_its_cards() -> None:
    network = Network(link=450, node=50)
    assert network.rate(8) == 450e9 and network.rate(64) == 50e9
    assert Network(450, 800).rate(64) == 450e9
    assert seconds(STEP, network, 8)["DDP"] == pytest.approx(2 * 4000 * 7 / 8 / 450e9)


def test_what_does_not_scale_is_named() -> None:
    rows, *slow = limits(STEP, Network(450, 400))
    assert "16 rows of this one can be shared between as many GPUs" in rows and not slow
    # 2 x 4,000 x 7 / 8 bytes take 1.4 s at 5,000 B/s, longer than the second of computing.
    named = limits(STEP, Network(450, 5e-6))[1:]
    assert any(line.startswith("DDP") and "from 64 GPUs" in line for line in named)
