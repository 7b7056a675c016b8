"""Compares the output of every layer with ``transformers`` and names the first layer that departs.

A location is a point of the forward pass, such as "vision layer 3". Hooks on both sides record outputs while
the loss is computed; nothing is recomputed. Patches are in the tower's order (by windows, where the family
has them), as in ``transformers``. Tokens are those of all samples, one sample after another, without the
padding of rows. Logits are compared for the tokens for which the trainer computes them: those with loss and a
few more (:func:`megatron_vl.data.packing.training_row.loss_index`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vl.spec.families import ModelSpec
from megatron_vl.training.batch_broadcast import StepBatch
from megatron_vl.training.trainer import Trainer

from .gather_tensors import LazyTensorFile, gather_to_rank_0
from .tolerances import ACTIVATION_TOLERANCE, BF16_ACTIVATION_RATIO, BF16_ROUNDING

type RankValues = Mapping[tuple[int, ...], Mapping[str, Tensor]]
"""The contribution of each rank, by its (dp, pp, cp, tp)."""

PATCH_EMBEDDING, VISION_MERGER, LOGITS = "patch embedding", "merger", "logits"
VISION_LOCATIONS = (PATCH_EMBEDDING, VISION_MERGER, "vision layer", "DeepStack merger")
"""Prefixes of the names of locations in the vision tower."""
ROW_LENGTHS = "lengths"
"""Key of an entry that is not a location: the number of tokens of each row without padding, int64 [rows]."""
SELECTED_TOKENS = "selected"
"""Prefix of entries that are not locations, one per row: the indices in the whole row of the tokens whose
logits were computed."""


def squared_norms(actual_tensor: Tensor, expected_tensor: Tensor) -> tuple[float, float]:
    """Returns the squared L2 norms of the difference and of ``expected_tensor``, computed in float64."""
    expected_tensor = expected_tensor.double()
    difference = actual_tensor.double() - expected_tensor
    return float(difference.square().sum()), float(expected_tensor.square().sum())


class ActivationRecorder:
    """Hooks on modules. Each copies a value to the host when the module is called."""

    def __init__(self) -> None:
        self.recorded_values: dict[str, list[Tensor]] = {}
        """Maps each location to its values, in the order of the calls. Locations are in the order of their
        hooks."""
        self._hook_handles: list[Any] = []

    def record_output(self, module: nn.Module, location: str) -> None:
        """Keeps the output of a module as the value of a location; of a tuple, its first element."""
        values = self.recorded_values.setdefault(location, [])
        self._hook_handles.append(module.register_forward_hook(lambda _, args, out: _keep(values, out)))

    def record_input(self, module: nn.Module, location: str) -> None:
        """Keeps an input of a module as the value of a location: ``hidden_states``, or the first argument."""
        values = self.recorded_values.setdefault(location, [])

        def record_argument(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            _keep(values, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        self._hook_handles.append(module.register_forward_pre_hook(record_argument, with_kwargs=True))

    def remove_hooks(self) -> None:
        """Removes the hooks. The recorded values stay."""
        for hook_handle in self._hook_handles:
            hook_handle.remove()


def _keep(values: list[Tensor], module_value: Any) -> None:
    module_value = module_value[0] if isinstance(module_value, tuple) else module_value
    # Always copy: pipeline stages free the memory of what they have sent.
    values.append(module_value.detach().to("cpu", copy=True))


class HfActivationRecorder(ActivationRecorder):
    """Records a model of ``transformers`` that runs samples one by one."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        super().__init__()
        vision_tower, language_model = model.model.visual, model.model.language_model
        deepstack_layers = list(spec.vision.deepstack_layers)

        self.record_input(vision_tower.blocks[0], PATCH_EMBEDDING)
        for i, vision_block in enumerate(vision_tower.blocks):
            self.record_output(vision_block, f"vision layer {i}")
            if i in deepstack_layers:
                k = deepstack_layers.index(i)
                self.record_output(vision_tower.deepstack_merger_list[k], f"DeepStack merger {k}")
        self.record_output(vision_tower.merger, VISION_MERGER)

        # transformers adds DeepStack's features after a layer. The input of the next module has them.
        self.record_input(language_model.layers[0], "embeddings")
        for i, next_module in enumerate([*language_model.layers[1:], language_model.norm]):
            self.record_input(next_module, f"decoder layer {i}")
        self.record_output(language_model.norm, "final norm")
        self.record_output(model.lm_head, LOGITS)

    def tensors_by_location(self) -> dict[str, Tensor]:
        """Maps each location, in forward order, to a tensor [positions, width] of all samples.

        The positions are patches in the tower, merge units after a merger, and tokens in the language model.
        """
        located_tensors: dict[str, Tensor] = {}
        for location, values in self.recorded_values.items():
            if values:
                located_tensors[location] = torch.cat([value.flatten(0, -2) for value in values])
        return located_tensors


class MegatronActivationRecorder(ActivationRecorder):
    """Records the outputs of this rank's chunks during one step. Rank 0 compares those of all ranks."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.grid = trainer.grid
        chunks = [chunk.module for chunk in trainer.model_chunks]
        self.sequence_parallel = chunks[0].config.sequence_parallel
        for number, chunk in enumerate(chunks):
            if chunk.vision_model is not None:
                self._record_tower(chunk.vision_model)
            self._record_language_model(chunk, trainer.layout.chunk_layers(self.grid.pp_rank, number))

    def _record_tower(self, vision_tower: Any) -> None:
        self.record_input(vision_tower.decoder.layers[0], PATCH_EMBEDDING)
        for i, layer in enumerate(vision_tower.decoder.layers):
            self.record_output(layer, f"vision layer {i}")
        for k, deepstack_merger in enumerate(vision_tower.deepstack_mergers):
            self.record_output(deepstack_merger, f"DeepStack merger {k}")
        self.record_output(vision_tower.merger, VISION_MERGER)

    def _record_language_model(self, model_chunk: Any, layer_numbers: range) -> None:
        for number, layer in zip(layer_numbers, model_chunk.language_model.decoder.layers, strict=True):
            if number == 0:
                self.record_input(layer, "embeddings")
            self.record_output(layer, f"decoder layer {number}")
        if model_chunk.post_process:
            self.record_output(model_chunk.language_model.decoder.final_layernorm, "final norm")
            self.record_output(model_chunk.language_model.output_layer, LOGITS)

    def compare_activations(self, step_batch: StepBatch, reference_dir: Path, dtype: str) -> dict[str, Any]:
        """Removes the hooks and compares the outputs of all ranks. Collective.

        Args:
            step_batch: the rows of the step.
            reference_dir: output of :mod:`toolkit.parity.reference_job`.

        Returns:
            On rank 0, {"activations": relative L2 error by location in forward order, "departs": the first
            location whose error is too large, or ""}; empty on the other ranks.
        """
        self.remove_hooks()
        local_values = self._local_contribution(step_batch)
        grid = self.grid
        key = (grid.dp_rank, grid.pp_rank, grid.cp_rank, grid.tp_rank)
        values_by_rank = gather_to_rank_0({key: local_values} if local_values else {}, grid)
        return compare_locations(values_by_rank, reference_dir, dtype) if grid.rank == 0 else {}

    def _local_contribution(self, step_batch: StepBatch) -> dict[str, Tensor]:
        """Maps "location/row" to the values [positions, width] that this rank contributes.

        The entries :data:`ROW_LENGTHS` and :data:`SELECTED_TOKENS` describe the rows. A rank without values
        has none of them. If all tensor-parallel ranks have the same values, only the first contributes them.
        """
        local_values: dict[str, Tensor] = {}
        row_length = step_batch.rows[0].tokens.numel()
        for location, recorded_rows in self.recorded_values.items():
            is_in_tower = location.startswith(VISION_LOCATIONS)
            is_split = self.sequence_parallel and not is_in_tower and location != LOGITS
            if not recorded_rows or self.grid.tp_rank and not is_split and location != LOGITS:
                continue
            encoded_rows = self._encoded_rows(step_batch)
            row_numbers = list(range(len(step_batch.rows)))
            if is_in_tower and len(recorded_rows) < len(row_numbers):
                row_numbers = encoded_rows  # the tower skipped the other rows

            token_count = row_length // self.grid.tp if is_split else row_length
            for row_number, row_values in zip(row_numbers, recorded_rows, strict=True):
                row_values = row_values.flatten(0, -2)
                if not is_in_tower:
                    # Cut off DeepStack's features, which follow the hidden state in the same tensor.
                    local_values[f"{location}/{row_number}"] = row_values[:token_count]
                elif row_number in encoded_rows:  # otherwise it is a dummy
                    local_values[f"{location}/{row_number}"] = row_values

        if local_values:
            local_values[ROW_LENGTHS] = torch.tensor([sum(lengths) for lengths in step_batch.segment_lengths])
            for row_number, row in enumerate(step_batch.rows):
                selected = torch.arange(row_length) if row.loss_index is None else row.loss_index.cpu()
                selected = selected + self.grid.cp_rank * row_length
                local_values[f"{SELECTED_TOKENS}/{row_number}"] = selected
        return local_values

    def _encoded_rows(self, step_batch: StepBatch) -> list[int]:
        """The rows of which this rank encodes pictures."""
        encoded_rows: list[int] = []
        for row_number, row in enumerate(step_batch.rows):
            has_pictures = bool(step_batch.vision_lengths[row_number][0])
            if has_pictures and (row.feature_route is None or row.feature_route.encodes):
                encoded_rows.append(row_number)
        return encoded_rows


def compare_locations(values_by_rank: RankValues, reference_dir: Path, dtype: str) -> dict[str, Any]:
    """Returns the relative L2 errors of all locations and the first location that departs.

    Args:
        reference_dir: output of :mod:`toolkit.parity.reference_job`.
    """
    reference_facts = json.loads((reference_dir / "reference.json").read_text())
    reference_tensors = LazyTensorFile(reference_dir / "activations.safetensors")
    errors: dict[str, float] = {}
    departures = []
    for location in reference_facts["order"]:
        errors[location] = _location_error(values_by_rank, reference_tensors, location)
        limit = ACTIVATION_TOLERANCE
        if dtype == "bfloat16":  # against the fp32 reference
            noise = reference_facts["activations_noise"][location]
            limit = BF16_ACTIVATION_RATIO * max(noise, BF16_ROUNDING)
        if not errors[location] <= limit:
            departures.append(location)
    return {"activations": errors, "departs": departures[0] if departures else ""}


def _location_error(values_by_rank: RankValues, reference_tensors: LazyTensorFile, location: str) -> float:
    """Returns the relative L2 error over all rows; infinite if positions are missing or not finite."""
    squared_difference = squared_scale = 0.0
    row_start = 0
    for row_values, row_length, token_indices in _rows_at_location(values_by_rank, location):
        expected_values = reference_tensors.read_slice(location, row_start, row_start + row_length)
        if token_indices is not None:
            expected_values = expected_values[token_indices]
        row_difference, row_scale = squared_norms(row_values, expected_values)
        squared_difference += row_difference
        squared_scale += row_scale
        row_start += row_length

    relative_error = math.sqrt(squared_difference / (squared_scale or 1.0))
    is_complete = row_start == reference_tensors[location].shape[0]
    return relative_error if is_complete and math.isfinite(relative_error) else math.inf


def _rows_at_location(
    values_by_rank: RankValues, location: str
) -> Iterator[tuple[Tensor, int, Tensor | None]]:
    """Yields the values of a location, row by row, in the order of the samples.

    Yields:
        The computed values [computed positions, width]; the number of the row's positions, without padding;
        the indices of the computed positions, or None if all were computed.
    """
    holders_by_row: dict[tuple[int, int], dict[tuple[int, ...], Mapping[str, Tensor]]] = {}
    for key in sorted(values_by_rank):
        for value_name in values_by_rank[key]:
            name, _, row_number = value_name.rpartition("/")
            if name == location:
                holders_by_row.setdefault((key[0], int(row_number)), {})[key] = values_by_rank[key]

    for (_, row_number), holders in sorted(holders_by_row.items()):
        value_name = f"{location}/{row_number}"
        row_length = int(next(iter(holders.values()))[ROW_LENGTHS][row_number])
        if location == LOGITS:
            row_values, token_indices = _logits_of_row(holders, row_number)
            is_real_token = token_indices < row_length  # the rest of the row is padding
            yield row_values[is_real_token], row_length, token_indices[is_real_token]
            continue
        # Context-parallel ranks split the tokens and the frames, tensor-parallel ranks the tokens.
        row_values = torch.cat([rank_values[value_name] for rank_values in holders.values()])
        row_length = len(row_values) if location.startswith(VISION_LOCATIONS) else row_length
        yield row_values[:row_length], row_length, None


def _logits_of_row(holders: RankValues, row_number: int) -> tuple[Tensor, Tensor]:
    """The computed logits of a row, and the indices of their tokens.

    Tensor-parallel ranks split the vocabulary, and context-parallel ranks the tokens.
    """
    logits_by_cp_rank: dict[int, list[Tensor]] = {}
    indices_by_cp_rank: dict[int, Tensor] = {}
    for (_, _, cp_rank, _), rank_values in sorted(holders.items()):
        logits_by_cp_rank.setdefault(cp_rank, []).append(rank_values[f"{LOGITS}/{row_number}"])
        indices_by_cp_rank[cp_rank] = rank_values[f"{SELECTED_TOKENS}/{row_number}"]
    token_logits = [torch.cat(parts, dim=-1) for parts in logits_by_cp_rank.values()]
    return torch.cat(token_logits), torch.cat(list(indices_by_cp_rank.values()))
