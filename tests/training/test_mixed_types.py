"""A model in bfloat16 with some parameters in float32: Qwen3.5's decays and the norm of linear attention."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from converters.convert import export_weights
from megatron_vl.weights.weight_reader import WeightReader
from tests.converters.helpers import read_tensors
from tests.support.ranks import call
from tests.training.programs import state_of_mixed_types
from tests.training.small_run import metrics, prepare, train

pytestmark = pytest.mark.ranks
FLOAT32 = ("A_log", "out_norm.weight")


@pytest.mark.parametrize("ranks", [1, 2])
def test_state_is_filed_under_its_own_parameter(tiny_checkpoint, ranks: int) -> None:
    slices = call(state_of_mixed_types, ranks, hf=str(tiny_checkpoint("qwen3_5")))
    assert {kind for name, kind, _ in slices if name.endswith(FLOAT32)} == {"torch.float32"}
    assert {kind for name, kind, _ in slices if not name.endswith(FLOAT32)} == {"torch.bfloat16"}
    assert [name for name, _, own in slices if not own] == []


BF16 = ["--dtype", "bfloat16", "--checkpoint.interval", "2", "--checkpoint.keep", "0"]


@pytest.mark.full
def test_a_run_in_bfloat16_goes_on(tiny_checkpoint, tmp_path: Path) -> None:
    """From the middle, it goes on bit for bit in its own layout and closely in another one; decays stay
    float32 in its checkpoints and in what is exported."""
    given = prepare(tmp_path / "given", tiny_checkpoint("qwen3_5"))
    done = train(given, tmp_path / "whole", *BF16, ranks=2, steps=4)
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = WeightReader(tmp_path / "whole")
    wide = {name for name in theirs.tensor_names() if theirs.dtype(name) == torch.float32}
    assert wide == {name for name in theirs.tensor_names() if name.endswith(FLOAT32)}

    for folder, layout, ranks in (("again", (), 2), ("other", ("--parallel.tp", "2"), 4)):
        run = tmp_path / folder
        shutil.copytree(tmp_path / "whole" / "step_00000002", run / "step_00000002")
        done = train(given, run, *BF16, *layout, ranks=ranks, steps=4)
        assert done.returncode == 0, done.stderr[-4000:]
        lines = [(line["step"], line["loss"]) for line in metrics(run)]
        whole = [(line["step"], line["loss"]) for line in metrics(tmp_path / "whole")][2:]
        ours = WeightReader(run)
        if folder == "again":
            assert lines == whole
            assert all(
                torch.equal(ours.read_shard(name), theirs.read_shard(name)) for name in theirs.tensor_names()
            )
        else:
            assert lines == [(step, pytest.approx(loss, rel=1e-2)) for step, loss in whole]
            for name in wide:  # a moment filed under another name would be off by far more
                ours_now, theirs_now = ours.read_shard(name), theirs.read_shard(name)
                assert (ours_now - theirs_now).norm() <= 2e-3 * theirs_now.norm(), name

    report = export_weights(tmp_path / "whole", given["hf"], tmp_path / "hf")
    back, first = read_tensors(tmp_path / "hf"), read_tensors(given["hf"])
    assert not report.cast and report.carried == 3
    assert {name: t.dtype for name, t in back.items()} == {name: t.dtype for name, t in first.items()}
    decays = [name for name in back if name.endswith("A_log")]
    assert decays and all(not torch.equal(back[name], first[name]) for name in decays)
