"""Inputs of recomputed layers in host memory: the same bits, less on the device, host memory is reused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from converters.convert import convert_weights
from megatron_vl.config import RecomputeConfig, RunConfigError, TrainConfig, validate_config
from megatron_vl.training.offload.layer_inputs import LayerInputOffload
from tests.support.ranks import call
from tests.tiny import tiny_checkpoint
from tests.training.layer_input_programs import inputs_left_on_the_device, trained_both_ways

LORA = {"rank": 4, "targets": ["language", "vision"]}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one rank": {},
        "LoRA": {"lora": LORA},
        "tower on every rank": {"decoupled": True, "patches": 32},
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


class LoggedStream:
    """A stream that knows the layers that it has run, or waited for."""

    def __init__(self, priority: int = 0) -> None:
        self.finished_layers: set[int] = set()

    def wait_event(self, event: LoggedEvent) -> None:
        self.finished_layers |= event.finished_layers

    def wait_stream(self, other: LoggedStream) -> None:
        self.finished_layers |= other.finished_layers


class LoggedEvent:
    def __init__(self) -> None:
        self.finished_layers: set[int] = set()

    def record(self, stream: LoggedStream) -> None:
        self.finished_layers = set(stream.finished_layers)


class KeptInput(torch.autograd.Function):
    """Keeps its input once its layer has run, as core's recompute does."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, stream: LoggedStream, layer: int) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        stream.finished_layers.add(layer)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, None


class LoggedBlock(torch.nn.Module):
    """What :class:`LayerInputOffload` needs of a transformer block of four layers."""

    def __init__(self, stream: LoggedStream, pre_process: bool) -> None:
        super().__init__()
        self.stream, self.pre_process, self.layers = stream, pre_process, range(4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = KeptInput.apply(hidden, self.stream, layer)
        return hidden


@pytest.mark.parametrize("pre_process", [True, False])
def test_a_copy_waits_for_the_layer_before(monkeypatch: pytest.MonkeyPatch, pre_process: bool) -> None:
    """Also in later pipeline stages, whose first kept input stays on the device."""
    compute_stream = LoggedStream()
    monkeypatch.setattr(torch.cuda, "Stream", LoggedStream)
    monkeypatch.setattr(torch.cuda, "Event", LoggedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute_stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    waited_for: list[list[int]] = []

    offload = LayerInputOffload(SimpleNamespace(name="cpu"))  # type: ignore[arg-type]
    take_pieces = offload.take_pieces

    def logged_take_pieces(count: int) -> list[torch.Tensor]:
        waited_for.append(sorted(offload.copy_stream.finished_layers))
        return take_pieces(count)

    monkeypatch.setattr(offload, "take_pieces", logged_take_pieces)
    block = LoggedBlock(compute_stream, pre_process)
    offload.follow(block)  # type: ignore[arg-type]
    block(torch.randn(4, 1, 8, requires_grad=True))
    assert waited_for == [[], [0], [0, 1], [0, 1, 2]][not pre_process :]


def test_without_full_recompute_there_is_no_input_to_move() -> None:
    with pytest.raises(RunConfigError, match=r"set recompute.language to full, or recompute.vision"):
        validate_config(TrainConfig(recompute=RecomputeConfig(offload_inputs=True)), 1)
