"""A run with optimizer state in host memory is that without, bit for bit, and the state moves."""

from __future__ import annotations

import pytest

from megatron_vl.training.offload.build import choose
from megatron_vl.training.offload.pinned import cores
from tests.support.ranks import call
from tests.training.offload_programs import poisoned, steps_by_share

SHARES = [0.0, 0.4, 1.0]


def test_the_share_is_met_by_whole_parameters() -> None:
    assert choose([5, 3, 2], 0.0) == set()
    assert choose([5, 3, 2], 0.4) == {1}
    assert choose([5, 3, 2], 0.7) == {0, 2}
    assert choose([5, 3, 2], 1.0) == {0, 1, 2}
    assert choose([1] * 1000, 0.333) == set(range(333))
    assert choose([], 1.0) == choose([0], 1.0) == set()


def test_cores_of_a_node() -> None:
    assert cores("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert cores("\n") == set()


def same(found: dict, dtype: str, trained: float = 1.0) -> None:
    """All shares gave the same losses, norms, weights and optimizer state, and the state was where it
    belongs."""
    for share in SHARES[1:]:
        assert found[str(share)] == found["0.0"], share
        held = found[f"{share} held"]
        assert share - 0.02 <= held["host"] <= share
        assert held["device"] == pytest.approx(1 - held["host"])
        assert held["chunks"] > 4 and held["cut"] > 1
    states = [step["state"] for step in found["0.0"][0]]
    assert len(set(states)) == len(states)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_shares_give_the_same_bits(tiny_checkpoint, dtype: str) -> None:
    """Parameters are cut in pieces, and the last chunk is not full."""
    same(call(steps_by_share, hf=str(tiny_checkpoint("qwen2_5_vl")), dtype=dtype, shares=SHARES), dtype)


@pytest.mark.ranks
def test_what_is_streamed_is_what_is_used(tiny_checkpoint) -> None:
    out = call(poisoned, hf=str(tiny_checkpoint("qwen2_5_vl")))
    assert out["device"] == out["plain"] != out["host"]
