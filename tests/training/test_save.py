"""A save goes on beside the next step, whose update waits until the state is copied."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_vl.training.state import optimizer_state as state_files
from megatron_vl.training.state.host_copies import HostBlocks, HostCopies
from megatron_vl.training.state.save import CheckpointSaver, take_snapshot
from tests.support.ranks import in_ranks
from tests.support.tiny_trainer import load, state_of, tiny_trainer
from toolkit.checkpoint.contents import verify_checkpoint

CHUNKS = {"dtype": "bfloat16", "moments_dtype": "bfloat16", "offload_fraction": 0.4}


@pytest.mark.parametrize("fields", [{}, CHUNKS])
@in_ranks()
def test_files_hold_the_state_from_before_the_next_update(hf, fields: dict[str, Any], tmp_path: Path) -> None:
    """Although copies and files take longer than the next passes. The state is in several files."""
    trainer = tiny_trainer(hf, **fields)
    trainer.run_step(0)
    saver = trainer.checkpoint_saver = CheckpointSaver(
        tmp_path, trainer.spec, trainer.layout, trainer.grid, 0
    )
    before, copy, order = state_of(trainer), HostCopies.copy, []

    def copy_slowly(self: HostCopies, memory: HostBlocks) -> None:
        time.sleep(1)
        copy(self, memory)
        order.append("copied")

    HostCopies.copy, state_files._FILE_BYTES = copy_slowly, 1 << 16
    trainer.step = 2
    saver.start_save(lambda: take_snapshot(trainer, None, {"dp": 1}), 2)
    order.append("returned")
    assert trainer.run_step(1).is_updated
    order.append("updated")
    saver.wait_until_saved()
    assert order == ["returned", "copied", "updated"]
    assert len(list(tmp_path.glob("step_00000002/optimizer/rank_00000*"))) > 3
    assert verify_checkpoint(tmp_path / "step_00000002") == []

    HostCopies.copy, after = copy, state_of(trainer)
    resumed = trainer.again()
    load(resumed, tmp_path)
    for name, tensor in state_of(resumed).items():
        assert torch.equal(tensor, before[name]), name
    assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) / 2


def test_memory_of_a_save_is_used_by_the_next() -> None:
    blocks = HostBlocks()
    first = blocks.regions([100, 300, 1 << 20], is_pinned=False)
    assert [len(region) for region in first] == [100, 300, 1 << 20]
    starts = [region.data_ptr() for region in first]
    assert starts[1] - starts[0] == 128 and starts[2] - starts[1] == 320  # aligned to 64 bytes
    assert [region.data_ptr() for region in blocks.regions([100, 300], False)] == starts[:2]
    assert len(blocks.regions([100, 300, 2 << 20], False)[2]) == 2 << 20  # too large for the block
