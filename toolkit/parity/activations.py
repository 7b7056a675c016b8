"""Compares the output of every layer with ``transformers`` and names the first layer that departs.

Hooks on both sides record outputs while the loss is computed; nothing is recomputed. Patches are in the
tower's order (by windows, where the family has them), as in ``transformers``. Tokens are those of all
samples, one sample after another, without the padding of rows. Logits are compared for the tokens for which
the trainer computes them: those with loss and a few more (:func:`megatron_vl.data.packing.row.loss_index`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
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

VISUAL = (PATCH, MERGER, "vision layer", "DeepStack merger")
"""Prefixes of the names of locations in the vision tower."""
LENGTHS = "lengths"
"""An entry beside the locations: the number of tokens of each row, without padding [rows]."""
SELECTED = "selected"
"""Entries beside the locations, one per row: the indices of the tokens whose logits were computed, in the
whole row."""


def squared_norms(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Returns the squared L2 norms of the difference and of ``want``, computed in float64."""
    want = want.double()
    return float((got.double() - want).square().sum()), float(want.square().sum())


class Watch:
    """Hooks on modules. Each copies a value to the host when the module is called."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Tensor]] = {}
        """Maps each location to its values, in the order of the calls."""
        self._handles: list[Any] = []

    def keep(self, location: str, value: Any) -> None:
        """Keeps a copy of a module's input or output; of a tuple, its first element."""
        value = value[0] if isinstance(value, tuple) else value
        # Always copy: pipeline stages free the memory of what they have sent.
        self.kept.setdefault(location, []).append(value.detach().to("cpu", copy=True))

    def output(self, module: nn.Module, location: str) -> None:
        """Keeps the output of a module as the value of a location."""
        self._handles.append(module.register_forward_hook(lambda m, args, out: self.keep(location, out)))

    def input(self, module: nn.Module, location: str, name: str = "hidden_states") -> None:
        """Keeps an input of a module as the value of a location: argument ``name``, or the first."""

        def hook(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.keep(location, kwargs[name] if name in kwargs else args[0])

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def close(self) -> None:
        """Removes the hooks; the kept values stay."""
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

        # transformers adds DeepStack's features after a layer. The input of the next module has them.
        locations = [EMBEDDED, *(f"decoder layer {i}" for i in range(spec.language.num_layers))]
        for module, location in zip([*language.layers, language.norm], locations, strict=True):
            self.input(module, location)
        self.output(language.norm, NORM)
        self.output(model.lm_head, LOGITS)

    def tensors(self) -> dict[str, Tensor]:
        """Maps each location to a tensor [positions, width] of all samples.

        The positions are patches in the tower, merge units after a merger, and tokens in the language model.
        """
        return {
            location: torch.cat([t.reshape(-1, t.shape[-1]) for t in parts])
            for location, parts in self.kept.items()
        }


# --- This project -------------------------------------------------------------------------------------------


class Recorder(Watch):
    """Records the outputs of this rank's chunks during one step. Rank 0 compares those of all ranks."""

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
        """Removes the hooks and compares the outputs of all ranks. Collective.

        Args:
            data: the rows of the step.
            folder: output of :mod:`toolkit.parity.stored`.

        Returns:
            On rank 0, {"activations": relative L2 error by location, "departs": the first location whose
            error is too large, or ""}; empty on the other ranks.
        """
        self.close()
        mine = self._contribution(data)
        self.kept.clear()

        grid = self.grid
        key = (grid.dp_rank, grid.pp_rank, grid.cp_rank, grid.tp_rank)
        parts = gather_on_first({key: mine} if mine else {}, grid)
        return compare_locations(parts, Path(folder), dtype) if grid.rank == 0 else {}

    def _contribution(self, data: StepData) -> dict[str, Tensor]:
        """Maps "location/row" to the values [positions, width] that this rank contributes.

        The entries :data:`LENGTHS` and :data:`SELECTED` describe the rows; a rank without values has none.
        """
        mine: dict[str, Tensor] = {}
        length = data.rows[0].tokens.numel()
        for location, values in self.kept.items():
            if not self._contributes(location):
                continue
            split = self.sequence_parallel and location != LOGITS
            tokens = length // self.grid.tp if split else length
            encoded = self._encoded(data)
            if location.startswith(VISUAL) and len(values) < len(data.rows):
                numbers = encoded  # the tower skipped the other rows
            else:
                numbers = list(range(len(data.rows)))

            for number, value in zip(numbers, values, strict=True):
                value = value.reshape(-1, value.shape[-1])
                if not location.startswith(VISUAL):
                    # Cut off DeepStack's features, which follow the hidden state in the same tensor.
                    mine[f"{location}/{number}"] = value[:tokens]
                elif number in encoded:  # otherwise it is a dummy
                    mine[f"{location}/{number}"] = value

        if mine:
            mine[LENGTHS] = torch.tensor([sum(lengths) for lengths in data.segment_lengths])
            for number, row in enumerate(data.rows):
                selected = torch.arange(length) if row.loss_index is None else row.loss_index.cpu()
                mine[f"{SELECTED}/{number}"] = selected + self.grid.cp_rank * length

        return mine

    def _encoded(self, data: StepData) -> list[int]:
        """The rows of which this rank encodes pictures."""
        return [
            number
            for number, row in enumerate(data.rows)
            if data.vision_lengths[number][0] and (row.feature_route is None or row.feature_route.encodes)
        ]

    def _contributes(self, location: str) -> bool:
        """Whether this rank contributes values of a location.

        If all tensor-parallel ranks have the same values, only the first one contributes them.
        """
        split = location == LOGITS or self.sequence_parallel and not location.startswith(VISUAL)
        return split or self.grid.tp_rank == 0


def compare_locations(
    parts: Mapping[tuple[int, ...], Mapping[str, Tensor]], folder: Path, dtype: str
) -> dict[str, Any]:
    """Returns the relative L2 errors of all locations and the first location that departs.

    Args:
        parts: maps (dp, pp, cp, tp) to the contribution of that rank.
        folder: output of :mod:`toolkit.parity.stored`.
    """
    facts = json.loads((folder / "reference.json").read_text())
    reference = StoredTensors(folder / "activations.safetensors")
    errors = {location: _location_error(parts, reference, location) for location in reference}

    limit = partial(activation_limit, noise=facts["activation_noise"], dtype=dtype)
    ordered = [location for location in facts["order"] if location in errors]
    return {
        "activations": {location: errors[location] for location in ordered},
        "departs": next((location for location in ordered if not errors[location] <= limit(location)), ""),
    }


def _location_error(
    parts: Mapping[tuple[int, ...], Mapping[str, Tensor]], reference: StoredTensors, location: str
) -> float:
    """Returns the relative L2 error over all rows; infinite if positions are missing or not finite."""
    difference = scale = 0.0
    start = 0
    for got, length, computed in rows_at(parts, location):
        want = reference.part(location, start, start + length)
        squares = squared_norms(got, want if computed is None else want[computed])
        difference += squares[0]
        scale += squares[1]
        start += length

    error = math.sqrt(difference / scale) if scale else math.sqrt(difference)
    complete = start == reference[location].shape[0]
    return error if complete and math.isfinite(error) else math.inf


def activation_limit(location: str, *, noise: dict[str, float], dtype: str) -> float:
    """The largest relative error that a location may have against the fp32 reference.

    Args:
        noise: for bf16, the error of ``transformers`` in bf16 at each location.
    """
    if dtype == "float32":
        return ACTIVATION_TOLERANCE
    return BF16_ACTIVATION_RATIO * max(noise[location], BF16_ROUNDING)


def rows_at(
    parts: Mapping[tuple[int, ...], Mapping[str, Tensor]], location: str
) -> Iterator[tuple[Tensor, int, Tensor | None]]:
    """Yields the values of a location, row by row, in the order of the samples.

    Args:
        parts: maps (dp, pp, cp, tp) to the contribution of that rank.

    Yields:
        The computed values [computed positions, width]; the number of the row's positions, without padding;
        the indices of the computed positions, or None if all were computed.
    """
    prefix = f"{location}/"
    for dp in sorted({key[0] for key in parts}):
        ranks = {key: parts[key] for key in sorted(parts) if key[0] == dp}
        names = {name for rank in ranks.values() for name in rank}
        numbers = sorted(int(name.removeprefix(prefix)) for name in names if name.startswith(prefix))

        for number in numbers:
            name = f"{prefix}{number}"
            holders = {key: rank for key, rank in ranks.items() if name in rank}
            length = int(next(iter(holders.values()))[LENGTHS][number])
            if location == LOGITS:
                values, indices = _logits_of_row(holders, name, f"{SELECTED}/{number}")
                real = indices < length  # the rest of the row is padding
                yield values[real], length, indices[real]
                continue

            # Context-parallel ranks split the tokens and the frames, tensor-parallel ranks the tokens.
            values = torch.cat([rank[name] for rank in holders.values()])
            if location.startswith(VISUAL):
                yield values, len(values), None
            else:
                yield values[:length], length, None


def _logits_of_row(
    holders: Mapping[tuple[int, ...], Mapping[str, Tensor]], name: str, selected: str
) -> tuple[Tensor, Tensor]:
    """The computed logits of a row, and the indices of their tokens.

    Tensor-parallel ranks split the vocabulary, and context-parallel ranks the tokens.
    """
    values, indices = [], []
    for cp in sorted({key[2] for key in holders}):
        ranks = [holders[key] for key in sorted(holders) if key[2] == cp]
        values.append(torch.cat([rank[name] for rank in ranks], dim=-1))
        indices.append(ranks[0][selected])
    return torch.cat(values), torch.cat(indices)
