"""Compares the output of every layer with ``transformers``, so that the first departing layer can be named.

Hooks on both sides record what the computation of the loss produces; nothing is recomputed. Patches are in
the tower's order (windows, where the family has them), as in ``transformers``. Tokens are those of the
samples one after another, without the padding of rows. Logits are compared for the tokens for which the
trainer computes them, those with loss (:func:`megatron_vl.data.row.loss_index`), and for a few more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vl.parallel.grid import ProcessGrid
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.training.feed import StepData

from .gather import StoredTensors, gather_on_first
from .locations import EMBEDDED, LOGITS, MERGER, NORM, PATCH
from .tolerances import ACTIVATION_TOLERANCE, BF16_ACTIVATION_RATIO, BF16_ROUNDING

Keep = Callable[[str, Any], None]
VISUAL = (PATCH, MERGER, "vision layer", "DeepStack merger")
"""How the names of locations in the vision tower begin."""
SELECTED = "selected"
"""An additional entry beside the locations: the tokens whose logits a row has."""


def relative_error(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Squared L2 norms of the difference and of ``want``, in float64."""
    want = want.double()
    return float((got.double() - want).square().sum()), float(want.square().sum())


class Watch:
    """Hooks on modules; each output is copied to the host at once, in the order of the calls."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Tensor]] = {}
        self._handles: list[Any] = []

    def keep(self, location: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        # Always copy: pipeline stages free the memory of what they have sent.
        self.kept.setdefault(location, []).append(value.detach().to("cpu", copy=True))

    def output(self, module: nn.Module, location: str) -> None:
        self._handles.append(module.register_forward_hook(lambda m, args, out: self.keep(location, out)))

    def input(self, module: nn.Module, location: str, name: str = "hidden_states") -> None:
        def hook(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.keep(location, kwargs[name] if name in kwargs else args[0])

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


# --- transformers -------------------------------------------------------------------------------------------


class HfWatch(Watch):
    """Records a model of ``transformers`` that runs samples one by one."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        super().__init__()
        tower, language = model.model.visual, model.model.language_model
        self.input(tower.blocks[0], PATCH)
        for i, block in enumerate(tower.blocks):
            self.output(block, f"vision layer {i}")
        for k in range(len(spec.vision.deepstack_layers)):
            self.output(tower.deepstack_merger_list[k], f"DeepStack merger {k}")
        self.output(tower.merger, MERGER)
        # DeepStack adds its features after a layer, so the input of the next layer is recorded.
        locations = [EMBEDDED, *(f"decoder layer {i}" for i in range(spec.language.num_layers))]
        for module, location in zip([*language.layers, language.norm], locations, strict=True):
            self.input(module, location)
        self.output(language.norm, NORM)
        self.output(model.lm_head, LOGITS)

    def tensors(self) -> dict[str, Tensor]:
        """Maps each location to a tensor [patches, tokens or merge units, width] of all samples."""
        return {
            location: torch.cat([t.reshape(-1, t.shape[-1]) for t in parts])
            for location, parts in self.kept.items()
        }


# --- This project -------------------------------------------------------------------------------------------


class Recorder(Watch):
    """Records this rank's chunks during one step and compares them on rank 0 with
    those of ``transformers``."""

    def __init__(self, wrapped: list[Any], layout: Layout, grid: ProcessGrid) -> None:
        super().__init__()
        self.grid = grid
        chunks = [chunk.module for chunk in wrapped]
        self.sequence_parallel = chunks[0].config.sequence_parallel
        for stage, chunk in enumerate(chunks):
            if chunk.vision_model is not None:
                self._watch_tower(chunk.vision_model)
            self._watch_language(chunk, layout.chunk_layers(grid.pp_rank, stage))

    def _watch_tower(self, tower: Any) -> None:
        self.input(tower.decoder.layers[0], PATCH)
        for i, layer in enumerate(tower.decoder.layers):
            self.output(layer, f"vision layer {i}")
        for k, merger in enumerate(tower.deepstack_mergers):
            self.output(merger, f"DeepStack merger {k}")
        self.output(tower.merger, MERGER)

    def _watch_language(self, chunk: Any, numbers: range) -> None:
        for number, layer in zip(numbers, chunk.language_model.decoder.layers, strict=True):
            if number == 0:
                self.input(layer, EMBEDDED)
            self.output(layer, f"decoder layer {number}")
        if chunk.post_process:
            self.output(chunk.language_model.decoder.final_layernorm, NORM)
            self.output(chunk.language_model.output_layer, LOGITS)

    def compare(self, data: StepData, folder: str, dtype: str) -> dict[str, Any]:
        """Collective. On rank 0: {"activations": relative L2 by location, "departs": the first location with
        too large an error, or ""}.

        Args:
            data: the rows of the step. folder: output of :mod:`toolkit.parity.stored`.
        """
        self.close()
        grid = self.grid
        length = data.rows[0].tokens.numel()
        mine: dict[str, Tensor] = {}
        for location, rows in self.kept.items():
            if not self._mine(location):
                continue
            for number, value in enumerate(rows):
                if location.startswith(VISUAL):
                    if data.vision_lengths[number][0]:  # otherwise it is the dummy of a text-only row
                        mine[f"{location}/{number}"] = value.reshape(-1, value.shape[-1])
                    continue
                # The levels of DeepStack travel after the hidden state.
                tokens = length // grid.tp if self.sequence_parallel and location != LOGITS else length
                mine[f"{location}/{number}"] = value.reshape(-1, value.shape[-1])[:tokens]

        self.kept.clear()
        if mine:
            mine["lengths"] = torch.tensor([sum(lengths) for lengths in data.segment_lengths])
            mine |= {
                f"{SELECTED}/{i}": row.loss_index.cpu()
                for i, row in enumerate(data.rows)
                if row.loss_index is not None
            }

        parts = gather_on_first({(grid.dp_rank, grid.pp_rank, grid.tp_rank): mine} if mine else {}, grid)
        return compare_places(parts, Path(folder), dtype) if grid.rank == 0 else {}

    def _mine(self, location: str) -> bool:
        """Whether this rank contributes to a location; the first tensor-parallel rank contributes what all
        of them have."""
        split = location == LOGITS or self.sequence_parallel and not location.startswith(VISUAL)
        return split or self.grid.tp_rank == 0


def compare_places(parts: dict[Any, Any], folder: Path, dtype: str) -> dict[str, Any]:
    """Relative L2 errors of all locations, and the first location that departs."""
    facts = json.loads((folder / "reference.json").read_text())
    want = StoredTensors(folder / "activations.safetensors")
    errors: dict[str, float] = {}
    for location in want:
        difference = scale = 0.0
        start = 0
        for got, tokens, computed in joined(parts, location):
            stop = start + tokens
            wanted = want.part(location, start, stop)
            both = relative_error(got, wanted if computed is None else wanted[computed])
            difference = difference + both[0]
            scale = scale + both[1]
            start = stop
        error = math.sqrt(difference / scale) if scale else math.sqrt(difference)
        complete = start == want[location].shape[0]
        errors[location] = error if complete and math.isfinite(error) else math.inf

    limit = partial(activation_limit, noise=facts["activation_noise"], dtype=dtype)
    ordered = [location for location in facts["order"] if location in errors]
    return {
        "activations": {location: errors[location] for location in ordered},
        "departs": next((location for location in ordered if not errors[location] <= limit(location)), ""),
    }


def activation_limit(location: str, *, noise: dict[str, float], dtype: str) -> float:
    """The largest error that a location may have against the fp32 reference."""
    return (
        ACTIVATION_TOLERANCE
        if dtype == "float32"
        else BF16_ACTIVATION_RATIO * max(noise[location], BF16_ROUNDING)
    )


def joined(parts: dict[Any, Any], location: str) -> Iterator[tuple[Tensor, int, Tensor | None]]:
    """Yields the rows of a place in the order of the samples, from (dp, pp, tp) -> tensors.

    For each row: the computed values [tokens or patches, width]; how many the row has; which of them were
    computed (None: all).
    """
    for dp in sorted({key[0] for key in parts}):
        ranks = [parts[key] for key in sorted(key for key in parts if key[0] == dp)]
        holders = [rank for rank in ranks if any(name.startswith(f"{location}/") for name in rank)]
        found = {name for rank in holders for name in rank}
        rows = [name for name in found if name.startswith(f"{location}/")]
        names = sorted(rows, key=lambda name: int(name.split("/")[1]))

        for name in names:
            row = torch.cat([rank[name] for rank in holders], dim=-1 if location == LOGITS else 0)
            number = int(name.split("/")[1])
            used = len(row) if location.startswith(VISUAL) else int(holders[0]["lengths"][number])
            if location == LOGITS and f"{SELECTED}/{number}" in holders[0]:
                computed = holders[0][f"{SELECTED}/{number}"]
                real = computed < used  # the rest of the row is padding
                yield row[real], used, computed[real]
            else:
                yield row[:used], used, None
