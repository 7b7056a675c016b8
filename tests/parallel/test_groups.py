"""Layouts that follow each other in the same processes share their groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.programs import groups_of_layouts, late_rank
from tests.support.ranks import call

pytestmark = pytest.mark.ranks


def test_layouts_share_groups(tiny_checkpoint) -> None:
    """Behind the first round no group and no thread is added; another default group begins anew."""
    out = call(groups_of_layouts, 2, hf=str(tiny_checkpoint("qwen2_5_vl")))
    assert out["right"]
    first, second = out["rounds"][:3], out["rounds"][3:]
    assert first[0] == first[1] == first[2]
    assert [groups for groups, _ in second] == [first[0][0]] * 3



def test_ranks_begin_a_layout_together(tiny_checkpoint, tmp_path: Path) -> None:
    """Nobody uses a kept group while another rank may still be in the layout before."""
    assert all(call(late_rank, 2, hf=str(tiny_checkpoint("qwen2_5_vl")), folder=str(tmp_path)))
