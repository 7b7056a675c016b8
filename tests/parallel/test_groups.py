"""Successive layouts in the same processes share their groups; tests how gloo groups are made and ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.programs import gloo_options, gloo_threads_at_the_end, groups_of_layouts, join, late_rank
from tests.support.ranks import call

pytestmark = pytest.mark.ranks


def test_layouts_share_groups(tiny_checkpoint) -> None:
    """After the first round no group and no thread is added; another default group starts from nothing."""
    out = call(groups_of_layouts, 2, hf=str(tiny_checkpoint("qwen2_5_vl")))
    assert out["right"]
    first = out["rounds"][:3]
    second = out["rounds"][3:]
    assert first[0] == first[1] == first[2]
    assert [groups for groups, _ in second] == [first[0][0]] * 3


def test_ranks_begin_a_layout_together(tiny_checkpoint, tmp_path: Path) -> None:
    """No rank uses a kept group while another rank may still be in the previous layout."""
    assert all(call(late_rank, 2, hf=str(tiny_checkpoint("qwen2_5_vl")), folder=str(tmp_path)))


@pytest.mark.parametrize("interfaces", ["", "lo"])
def test_gloo_groups_have_one_worker(tiny_checkpoint, interfaces: str) -> None:
    """With two workers, torch's default, operations that end together corrupt
    the heap (core_fixes/gloo_threads.py)."""
    hf = str(tiny_checkpoint("qwen2_5_vl"))
    out = call(gloo_options, 2, environment={"GLOO_SOCKET_IFNAME": interfaces}, hf=hf)
    assert out == {"threads": [1] * 4, "devices": [1] * 4, "timeouts": [1800.0] * 4, "sum": 2.0}


def test_unknown_interface_is_refused() -> None:
    """GLOO_SOCKET_IFNAME applies: torch's own constructor refuses a name that does not exist too."""
    with pytest.raises(AssertionError, match="nowhere0"):
        call(join, environment={"GLOO_SOCKET_IFNAME": "nowhere0"})


def test_nothing_holds_a_group_after_the_end(tiny_checkpoint) -> None:
    """A gloo group held while Python exits can abort the process; its threads live as long as the group."""
    before, after = call(gloo_threads_at_the_end, 2, hf=str(tiny_checkpoint("qwen2_5_vl")))
    assert before > 0
    assert after == 0
