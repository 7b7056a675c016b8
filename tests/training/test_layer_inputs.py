"""Inputs of recomputed layers in host memory: the same bits, less on the device, host memory is reused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from converters.convert import convert_weights
from megatron_vl.config import RecomputeConfig, RunConfigError, TrainConfig, validate_config
from tests.support.ranks import call
from tests.tiny import tiny_checkpoint
from tests.training.layer_input_programs import inputs_left_on_the_device, trained_both_ways

LORA = {"rank": 4, "targets": ["language", "vision"]}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one rank": {},
        "LoRA": {"lora": LORA},
        "tower on every rank": {"decoupled": True, "patches": 32, "kept_patches": 100},
    },
    2: {
        "CP2": {"cp": 2},
        "PP2": {"pp": 2},
        "PP2 x VPP2": {"pp": 2, "vpp": 2},
        "PP2, LoRA": {"pp": 2, "lora": LORA},
        "TP2 + SP": {"tp": 2, "sequence_parallel": True, "overlap": True},
    },
}


@pytest.mark.ranks
@pytest.mark.parametrize(("family", "ranks"), [("qwen3_vl", 1), ("qwen3_vl", 2), ("qwen3_5_moe", 1)])
def test_a_training_gives_the_same_bits(family: str, ranks: int, tmp_path: Path) -> None:
    """Two steps of four rows: losses, weights and optimizer state."""
    hf = tiny_checkpoint(family, dtype=torch.float32)
    convert_weights(hf, tmp_path / "weights")
    where = {"hf": str(hf), "weights": str(tmp_path / "weights"), "folder": str(tmp_path)}
    results = call(trained_both_ways, ranks, layouts=LAYOUTS[ranks], **where)
    assert results == dict.fromkeys(LAYOUTS[ranks], {"equal losses": True, "changed": []})


@pytest.mark.ranks
def test_inputs_leave_the_device_and_host_memory_is_reused(tmp_path: Path) -> None:
    """Autograd keeps the input of each layer without the option, and none with it."""
    hf = tiny_checkpoint("qwen2_5_vl", dtype=torch.float32)
    convert_weights(hf, tmp_path / "weights")
    found = call(inputs_left_on_the_device, hf=str(hf), weights=str(tmp_path / "weights"))
    assert (found["device"], found["host"]) == (found["layers"], 0)
    assert len(set(found["pieces"])) == 1 and found["pieces"][0] > found["layers"] and found["busy"] == 0


def test_without_full_recompute_there_is_no_input_to_move() -> None:
    with pytest.raises(RunConfigError, match=r"set recompute.language to full, or recompute.vision"):
        validate_config(TrainConfig(recompute=RecomputeConfig(offload_inputs=True)), 1)
