"""The trainer with experts: its log, and checkpoints of expert parallelism that go on in other layouts."""

import shutil
from pathlib import Path

import pytest
import torch

from converters.compare import compare_weights
from converters.convert import export_weights
from megatron_vl.weights.weight_reader import WeightReader
from tests.support.tiny_run import metrics, prepare, trained
from toolkit.checkpoint.contents import verify_checkpoint

pytestmark = pytest.mark.ranks

QUICK = ["--data.num_workers", "0"]
LAYOUT = ["--parallel.ep", "2", *QUICK]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> dict[str, Path]:
    hf = tiny_checkpoint("qwen3_vl_moe", dtype=torch.float32)
    return prepare(tmp_path_factory.mktemp("run") / "prepared", hf)


@pytest.fixture(scope="module")
def whole(prepared: dict[str, Path]) -> Path:
    """Six steps on two ranks that share the experts, with load-balancing loss and two checkpoints."""
    run = prepared["folder"] / "whole"
    saves = ["--checkpoint.interval", "3", "--checkpoint.keep", "0"]
    printed = trained(prepared, run, *LAYOUT, *saves, "--model.moe_aux_loss", "0.01", ranks=2)
    assert "x ep 2" in printed
    assert "load-balancing loss of the experts: coefficient 0.01 (model.moe_aux_loss)" in printed
    return run


def test_busiest_expert_is_in_the_log(whole: Path) -> None:
    for line in metrics(whole):
        assert 1.0 <= line["expert_load"] <= 4.0  # 2 of 8 experts a token: 4 is one pair for all
        assert 1.0 <= line["expert_rank_load"] <= 2.0  # two ranks


def test_run_goes_on_in_another_layout(prepared, whole, tmp_path) -> None:
    """Saved on two ranks; four ranks that also cut experts give the same samples, and losses within 1e-6."""
    options = "--parallel.tp 2 --parallel.sequence_parallel true --parallel.ep 2 --parallel.etp 2".split()
    shutil.copytree(whole / "step_00000003", tmp_path / "step_00000003")
    trained(prepared, tmp_path, *options, *QUICK, "--model.moe_aux_loss", "0.01")
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [4, 5, 6]
    for ours, theirs in zip(lines, metrics(whole)[3:], strict=True):
        assert ours["loss_tokens"] == theirs["loss_tokens"] and ours["samples"] == theirs["samples"]
        assert ours["expert_load"] == theirs["expert_load"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    a, b = WeightReader(tmp_path), WeightReader(whole)
    for name in b.tensor_names():
        assert (a.read_shard(name) - b.read_shard(name)).norm() <= 1e-4 * b.read_shard(name).norm(), name


def test_exported_checkpoint_has_the_trained_experts(prepared, whole, tmp_path) -> None:
    assert verify_checkpoint(whole / "step_00000006") == []
    export_weights(whole, prepared["hf"], tmp_path / "hf")
    assert compare_weights(tmp_path / "hf", whole).differences == []
    last, first = WeightReader(whole), WeightReader(prepared["weights"])
    for name in last.tensor_names():
        if ".experts." in name:  # every one of them was trained
            changed = (last.read_shard(name) != first.read_shard(name)).flatten(1).any(1)
            assert changed.all(), name
