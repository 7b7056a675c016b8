"""Inputs of recomputed layers in host memory: the same bits, less on the device, host memory is reused."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_vl.training.offload import layer_inputs, row_features
from megatron_vl.training.offload.layer_inputs import LayerInputOffload
from megatron_vl.training.step import run_schedule
from tests.support.ranks import in_ranks
from tests.support.tiny_trainer import differences, save, train, trainer_of
from tests.training.test_context_parallel import ROWS
from toolkit.parity.case import draw_samples, pack_step

LORA = {"rank": 4, "targets": ["language", "vision"]}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"LoRA": {"lora": LORA}, "tower on every rank": {"decoupled": True, "patches": 32}},
    2: {"PP2 x VPP2": {"pp": 2, "vpp": 2}, "TP2 + SP": {"tp": 2, "sequence_parallel": True, "overlap": True}},
}
FULL = {"language": "full", "vision": "full"}
FEATURE_ROWS = [["image"], ["text"], ["mixed"], ["image"], ["image"], ["text"]]
"""The fourth and the fifth have equally many features, which could take each other's place."""
PIECE_BYTES = 1000
"""Smaller than any input, which then has several pieces, the last of them not full."""


@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [("qwen3_vl", 1), ("qwen3_vl", 2), pytest.param("qwen3_5_moe", 1, marks=pytest.mark.full)],
)
@in_ranks(lambda params: params["num_ranks"])
def test_offloaded_inputs_train_the_same_bits(hf, family: str, num_ranks: int, tmp_path: Path) -> None:
    """A step of four rows: losses, weights and optimizer state."""
    layer_inputs.PIECE_BYTES = PIECE_BYTES
    for name, layout in LAYOUTS[num_ranks].items():
        losses, tensors = [], []
        for recompute in (FULL, FULL | {"offload_inputs": True}):
            trainer = trainer_of(hf, recompute=recompute, **layout)
            losses.append([result.loss for result in train(trainer, ROWS, range(1))])
            tensors.append(save(trainer, tmp_path / f"{name}{len(losses)}"))
        assert losses[0] == losses[1] and differences(*tensors) == [], name


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_vl", {"pp": 2, "vpp": 2}),
        ("qwen2_5_vl", {"tp": 2, "sequence_parallel": True, "overlap": True}),
        pytest.param("qwen3_vl", {"cp": 2}, marks=pytest.mark.full),
    ],
)
@in_ranks(2)
def test_features_of_rows_in_host_memory_train_the_same_bits(
    hf, family: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    """Two steps with features of all rows on the device, and with those of all but the first on the host."""
    layer_inputs.PIECE_BYTES = PIECE_BYTES
    losses, tensors = [], []
    for on_device in (99, 1):
        row_features.FEATURE_ROWS_ON_DEVICE = on_device
        trainer = trainer_of(hf, decoupled=True, patches=32, **layout)
        losses.append([result.loss for result in train(trainer, FEATURE_ROWS, range(2))])
        tensors.append(save(trainer, tmp_path / str(on_device)))
        keep = trainer.model_chunks[0].module.decoupled.keep_features
        pieces = inspect.getclosurevars(keep).nonlocals["pieces"]
        num_pieces, has_host_rows = pieces.num_pieces, on_device == 1 and trainer.grid.pp_rank == 0
        assert bool(num_pieces) == has_host_rows and len(pieces.free_pieces) == num_pieces

        # A pass without gradients gives the memory back too, although its rows are still there.
        rows = pack_step(trainer, draw_samples(FEATURE_ROWS, trainer.spec, 0)).rows
        with torch.no_grad():
            run_schedule(trainer.model_chunks, rows, seq_len=trainer.config.data.seq_len, forward_only=True)
        assert len(pieces.free_pieces) == pieces.num_pieces == num_pieces

        # What stays on the device does not hold the features of all rows, not even an empty part.
        features = torch.zeros(6, 2, 4)
        kept = [each.features.untyped_storage() for each in keep(features.split([2, 4, 0]), True)]
        is_whole = [storage.data_ptr() == features.data_ptr() for storage in kept]
        assert is_whole == [on_device == 99] * 3
    assert losses[0] == losses[1] and differences(*tensors) == []


@in_ranks()
def test_inputs_leave_the_device_and_host_memory_is_reused(hf) -> None:
    """Autograd keeps the input of each layer without the option, and none with it."""
    layer_inputs.PIECE_BYTES = PIECE_BYTES
    trainer = trainer_of(hf, recompute=FULL)
    [row] = pack_step(trainer, draw_samples([["image", "text"]], trainer.spec, 0)).rows
    chunk = trainer.model_chunks[0].module
    layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]
    assert count_inputs_alive(chunk, layers, row) == len(layers)

    offload = layer_inputs.offload_layer_inputs([chunk], trainer.platform)
    assert count_inputs_alive(chunk, layers, row) == 0
    num_pieces = offload.num_pieces
    assert num_pieces > len(layers)
    for has_backward in (False, True):  # the first pass is dropped without a backward pass
        with torch.no_grad():
            chunk(row)
        assert len(offload.free_pieces) == offload.num_pieces, "nothing is kept without a backward pass"
        loss = chunk(row).sum()
        if has_backward:
            loss.backward()
        del loss
        assert offload.num_pieces == num_pieces
    assert len(offload.free_pieces) == num_pieces


def count_inputs_alive(chunk: Any, layers: list[TransformerLayer], row: Any) -> int:
    """Number of inputs of layers that exist between the forward and the backward pass of a row."""
    inputs: list[Any] = []

    def note(layer: Any, args: Any, kwargs: Any) -> None:
        inputs.append(weakref.ref(kwargs["hidden_states"]))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    loss = chunk(row).sum()
    alive = sum(reference() is not None for reference in inputs)
    assert len(inputs) == len(layers)
    for handle in handles:
        handle.remove()
    loss.backward()
    return alive


class Progress:
    """A stream or an event, which knows the layers that it has run, or waited for."""

    def __init__(self, priority: int = 0) -> None:
        self.layers: set[int] = set()

    def take(self, other: Progress) -> None:
        self.layers |= other.layers

    record = wait_event = wait_stream = take


class KeptInput(torch.autograd.Function):
    """Keeps its input once its layer has run, as core's recompute does."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, stream: Progress, layer: int) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        stream.layers.add(layer)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, None


class Block(torch.nn.Module):
    """What :class:`LayerInputOffload` needs of a transformer block of four layers."""

    def __init__(self, stream: Progress, pre_process: bool) -> None:
        super().__init__()
        self.stream, self.pre_process, self.layers = stream, pre_process, range(4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = KeptInput.apply(hidden, self.stream, layer)
        return hidden


@pytest.mark.parametrize("pre_process", [True, False])
def test_copy_waits_for_the_layer_before(monkeypatch: pytest.MonkeyPatch, pre_process: bool) -> None:
    """Also in later pipeline stages, whose first kept input stays on the device."""
    compute_stream = Progress()
    faked = {"current_stream": lambda: compute_stream, "stream": lambda _: contextlib.nullcontext()}
    for name, fake in (faked | {"Stream": Progress, "Event": Progress}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    waited_for: list[list[int]] = []

    offload = LayerInputOffload(SimpleNamespace(name="cpu"))  # type: ignore[arg-type]
    take_pieces = offload.take_pieces

    def logged_take_pieces(count: int) -> list[torch.Tensor]:
        waited_for.append(sorted(offload.copy_stream.layers))
        return take_pieces(count)

    monkeypatch.setattr(offload, "take_pieces", logged_take_pieces)
    block = Block(compute_stream, pre_process)
    offload.follow(block)  # type: ignore[arg-type]
    block(torch.randn(4, 1, 8, requires_grad=True))
    assert waited_for == [[], [0], [0, 1], [0, 1, 2]][not pre_process :]
