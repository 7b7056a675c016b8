"""What the ranks of :mod:`tests.training.test_layer_inputs` run."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_vl.training.offload import layer_inputs
from tests.training.decoupled_programs import saved_tensors
from tests.training.lora_programs import build, start, train
from toolkit.parity.case import draw_samples, pack_step

FULL = {"language": "full", "vision": "full"}
ON_HOST = FULL | {"offload_inputs": True}
PIECE_BYTES = 1000
"""Smaller than any input, which then has several pieces, the last of them not full."""


def trained_both_ways(
    hf: str, weights: str, folder: str, layouts: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Trains each layout with the inputs of layers on the device and in host memory.

    Returns, on rank 0, by layout: whether losses are equal, and the names of tensors that differ.
    """
    platform = start("cpu")
    layer_inputs.PIECE_BYTES = PIECE_BYTES
    results: dict[str, Any] = {}
    for name, layout in layouts.items():
        fields = dict(layout)
        lora = fields.pop("lora", {})
        losses, tensors = [], []
        for recompute in (FULL, ON_HOST):
            live = build(name, hf, weights, lora, fields | {"recompute": recompute}, platform)
            losses.append(train(live, platform))
            tensors.append(saved_tensors(live, Path(folder) / f"{name}{len(losses)}"))
        changed = [key for key, tensor in tensors[0].items() if not torch.equal(tensor, tensors[1][key])]
        results[name] = {"equal losses": losses[0] == losses[1], "changed": changed}
    return results


def inputs_left_on_the_device(hf: str, weights: str) -> dict[str, Any]:
    """The inputs of layers that exist after the forward pass of a row, and pieces of host memory over steps.

    Returns:
        ``layers``; ``device`` and ``host``: numbers of inputs that exist, by the place they should be in;
        ``pieces``: after each of three passes, the second of which is dropped without a backward pass;
        ``busy``: pieces that are still in use at the end.
    """
    platform = start("cpu")
    layer_inputs.PIECE_BYTES = PIECE_BYTES
    live = build("full", hf, weights, {}, {"recompute": FULL}, platform)
    [row] = pack_step(live, draw_samples([["image", "text"]], live.spec, 0)).rows
    chunk = live.model_chunks[0].module
    layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]
    results: dict[str, Any] = {"layers": len(layers), "device": inputs_alive(chunk, layers, row)}

    offload = layer_inputs.offload_layer_inputs([chunk], platform)
    results["host"] = inputs_alive(chunk, layers, row)
    results["pieces"] = [offload.num_pieces]
    for has_backward in (False, True):
        with torch.no_grad():
            chunk(row)
        assert len(offload.free_pieces) == offload.num_pieces, "nothing is kept without a backward pass"
        loss = chunk(row).sum()
        if has_backward:
            loss.backward()
        del loss
        results["pieces"].append(offload.num_pieces)
    return results | {"busy": offload.num_pieces - len(offload.free_pieces)}


def inputs_alive(chunk: Any, layers: list[TransformerLayer], row: Any) -> int:
    """Number of inputs of layers that exist between the forward and the backward pass of a row."""
    references: list[Any] = []
    handles = []
    for layer in layers:
        handles.append(
            layer.register_forward_pre_hook(
                lambda layer, args, kwargs: references.append(weakref.ref(kwargs["hidden_states"])),
                with_kwargs=True,
            )
        )
    loss = chunk(row).sum()
    alive = sum(reference() is not None for reference in references)
    assert len(references) == len(layers)
    for handle in handles:
        handle.remove()
    loss.backward()
    return alive
