"""What every layer gives, ours against ``transformers``, so that the first layer that departs can be named.

Both sides are watched with hooks while they do what they do for the loss; nothing is recomputed. Patches are
in the tower's order (windows, where the family has them), which is that of ``transformers`` too. Tokens are
those of the samples one behind the other, without the padded tails of rows. Logits are compared for the
tokens that the trainer computes them for: those that bear loss (:func:`megatron_vl.data.row.loss_index`), and
a few more.
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

from megatron_vl.parallel.grid import Grid
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.training.feed import StepData

from .gather import StoredTensors, gather_on_first
from .places import EMBEDDED, LOGITS, MERGER, NORM, PATCH
from .tolerances import ACTIVATION_TOLERANCE, BF16_ACTIVATION_RATIO, BF16_ROUNDING

Keep = Callable[[str, Any], None]
VISUAL = (PATCH, MERGER, "vision layer", "DeepStack merger")
"""What the names of places in the vision tower begin with."""
SELECTED = "selected"
"""Beside the places: the tokens whose logits a row has."""


def relative_error(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Squared L2 norms of the difference and of ``want``, in float64."""
    want = want.double()
    return float((got.double() - want).square().sum()), float(want.square().sum())


class Watch:
    """Hooks on modules; what is watched is copied to the host as it comes, in the order of the calls."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Tensor]] = {}
        self._handles: list[Any] = []

    def keep(self, place: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        # A copy in any case: pipeline stages free the memory of what they have sent.
        self.kept.setdefault(place, []).append(value.detach().to("cpu", copy=True))

    def output(self, module: nn.Module, place: str) -> None:
        self._handles.append(module.register_forward_hook(lambda m, args, out: self.keep(place, out)))

    def input(self, module: nn.Module, place: str, name: str = "hidden_states") -> None:
        def hook(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.keep(place, kwargs[name] if name in kwargs else args[0])

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


# --- Transformers -------------------------------------------------------------------------------------------


class HfWatch(Watch):
    """Watches a model of ``transformers`` that runs samples one by one."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        super().__init__()
        tower, language = model.model.visual, model.model.language_model
        self.input(tower.blocks[0], PATCH)
        for i, block in enumerate(tower.blocks):
            self.output(block, f"vision layer {i}")
        for k in range(len(spec.vision.deepstack_layers)):
            self.output(tower.deepstack_merger_list[k], f"DeepStack merger {k}")
        self.output(tower.merger, MERGER)
        # What DeepStack adds comes behind a layer: hence the input of the next one.
        places = [EMBEDDED, *(f"decoder layer {i}" for i in range(spec.language.num_layers))]
        for module, place in zip([*language.layers, language.norm], places, strict=True):
            self.input(module, place)
        self.output(language.norm, NORM)
        self.output(model.lm_head, LOGITS)

    def tensors(self) -> dict[str, Tensor]:
        """Place -> [patches, tokens or merge units, width] of all samples."""
        return {
            place: torch.cat([t.reshape(-1, t.shape[-1]) for t in parts])
            for place, parts in self.kept.items()
        }


# --- This side ----------------------------------------------------------------------------------------------


class Recorder(Watch):
    """Watches this rank's chunks during one step and compares on rank 0 with what ``transformers`` gave."""

    def __init__(self, wrapped: list[Any], layout: Layout, grid: Grid) -> None:
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
        """Collective. On rank 0: {"activations": relative L2 by place, "departs": the first place that is too
        far off, or ""}.

        Args:
            data: the rows of the step. folder: what :mod:`toolkit.parity.stored` wrote.
        """
        self.close()
        grid, length = self.grid, data.rows[0].tokens.numel()
        mine: dict[str, Tensor] = {}
        for place, rows in self.kept.items():
            if not self._mine(place):
                continue
            for number, value in enumerate(rows):
                if place.startswith(VISUAL):
                    if data.vision_lengths[number][0]:  # else the dummy of a text-only row
                        mine[f"{place}/{number}"] = value.reshape(-1, value.shape[-1])
                    continue
                # Levels of DeepStack travel behind the hidden state.
                tokens = length // grid.tp if self.sequence_parallel and place != LOGITS else length
                mine[f"{place}/{number}"] = value.reshape(-1, value.shape[-1])[:tokens]
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

    def _mine(self, place: str) -> bool:
        """Whether this rank brings a part of a place: of what all tensor-parallel ranks have, the first
        brings it."""
        split = place == LOGITS or self.sequence_parallel and not place.startswith(VISUAL)
        return split or self.grid.tp_rank == 0


def compare_places(parts: dict[Any, Any], folder: Path, dtype: str) -> dict[str, Any]:
    """Relative L2 errors of all places and the first that departs."""
    facts, want = (
        json.loads((folder / "reference.json").read_text()),
        StoredTensors(folder / "activations.safetensors"),
    )
    errors: dict[str, float] = {}
    for place in want:
        difference = scale = 0.0
        start = 0
        for got, tokens, computed in joined(parts, place):
            stop = start + tokens
            wanted = want.part(place, start, stop)
            both = relative_error(got, wanted if computed is None else wanted[computed])
            difference, scale, start = difference + both[0], scale + both[1], stop
        error = math.sqrt(difference / scale) if scale else math.sqrt(difference)
        complete = start == want[place].shape[0]
        errors[place] = error if complete and math.isfinite(error) else math.inf
    limit = partial(activation_limit, noise=facts["activation_noise"], dtype=dtype)
    ordered = [place for place in facts["order"] if place in errors]
    return {
        "activations": {place: errors[place] for place in ordered},
        "departs": next((place for place in ordered if not errors[place] <= limit(place)), ""),
    }


def activation_limit(place: str, *, noise: dict[str, float], dtype: str) -> float:
    """How far a place may be from the fp32 reference."""
    return (
        ACTIVATION_TOLERANCE
        if dtype == "float32"
        else BF16_ACTIVATION_RATIO * max(noise[place], BF16_ROUNDING)
    )


def joined(parts: dict[Any, Any], place: str) -> Iterator[tuple[Tensor, int, Tensor | None]]:
    """The rows of a place in the order of the samples, from (dp, pp, tp) -> tensors.

    Of each row: what was computed, [tokens or patches, width]; how many it has; which of them were computed,
    None: all.
    """
    for dp in sorted({key[0] for key in parts}):
        ranks = [parts[key] for key in sorted(key for key in parts if key[0] == dp)]
        holders = [rank for rank in ranks if any(name.startswith(f"{place}/") for name in rank)]
        names = sorted(
            {n for rank in holders for n in rank if n.startswith(f"{place}/")},
            key=lambda n: int(n.split("/")[1]),
        )
        for name in names:
            row, number = (
                torch.cat([rank[name] for rank in holders], dim=-1 if place == LOGITS else 0),
                int(name.split("/")[1]),
            )
            used = len(row) if place.startswith(VISUAL) else int(holders[0]["lengths"][number])
            if place == LOGITS and f"{SELECTED}/{number}" in holders[0]:
                computed = holders[0][f"{SELECTED}/{number}"]
                real = computed < used  # the rest of the row is padding
                yield row[real], used, computed[real]
            else:
                yield row[:used], used, None
