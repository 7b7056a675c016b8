"""Compares the output of every layer with ``transformers`` and names the first layer that departs.

Hooks on both sides record outputs while the loss is computed; nothing is recomputed. Patches are in the
tower's order (by windows, where the family has them), as in ``transformers``. Tokens are those of all
samples, one sample after another, without the padding of rows. Logits are compared for the tokens for which
the trainer computes them: those with loss and a few more
(:func:`megatron_vl.data.packing.training_row.loss_index`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.training.batch_broadcast import StepBatch

from .gather_tensors import LazyTensorFile, gather_to_rank_0
from .locations import FINAL_NORM, LOGITS, PATCH_EMBEDDING, TOKEN_EMBEDDINGS, VISION_MERGER
from .tolerances import ACTIVATION_TOLERANCE, BF16_ACTIVATION_RATIO, BF16_ROUNDING

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
        """Maps each location to its values, in the order of the calls."""
        self._hook_handles: list[Any] = []

    def record_value(self, location: str, module_value: Any) -> None:
        """Keeps a copy of a module's input or output; of a tuple, its first element."""
        module_value = module_value[0] if isinstance(module_value, tuple) else module_value
        # Always copy: pipeline stages free the memory of what they have sent.
        self.recorded_values.setdefault(location, []).append(module_value.detach().to("cpu", copy=True))

    def record_output(self, module: nn.Module, location: str) -> None:
        """Keeps the output of a module as the value of a location."""
        self._hook_handles.append(
            module.register_forward_hook(lambda hooked_module, args, out: self.record_value(location, out))
        )

    def record_input(self, module: nn.Module, location: str) -> None:
        """Keeps an input of a module as the value of a location: ``hidden_states``, or the first argument."""

        def record_argument(hooked_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.record_value(location, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        self._hook_handles.append(module.register_forward_pre_hook(record_argument, with_kwargs=True))

    def remove_hooks(self) -> None:
        """Removes the hooks. The recorded values stay."""
        for hook_handle in self._hook_handles:
            hook_handle.remove()


# --- transformers -------------------------------------------------------------------------------------------


class HfActivationRecorder(ActivationRecorder):
    """Records a model of ``transformers`` that runs samples one by one."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        super().__init__()
        vision_tower, language_model = model.model.visual, model.model.language_model

        self.record_input(vision_tower.blocks[0], PATCH_EMBEDDING)
        for i, vision_block in enumerate(vision_tower.blocks):
            self.record_output(vision_block, f"vision layer {i}")
        for k in range(len(spec.vision.deepstack_layers)):
            self.record_output(vision_tower.deepstack_merger_list[k], f"DeepStack merger {k}")
        self.record_output(vision_tower.merger, VISION_MERGER)

        # transformers adds DeepStack's features after a layer. The input of the next module has them.
        self.record_input(language_model.layers[0], TOKEN_EMBEDDINGS)
        for i, next_module in enumerate([*language_model.layers[1:], language_model.norm]):
            self.record_input(next_module, f"decoder layer {i}")
        self.record_output(language_model.norm, FINAL_NORM)
        self.record_output(model.lm_head, LOGITS)

    def tensors_by_location(self) -> dict[str, Tensor]:
        """Maps each location to a tensor [positions, width] of all samples.

        The positions are patches in the tower, merge units after a merger, and tokens in the language model.
        """
        located_tensors: dict[str, Tensor] = {}
        for location, sample_values in self.recorded_values.items():
            flat_values = [value.reshape(-1, value.shape[-1]) for value in sample_values]
            located_tensors[location] = torch.cat(flat_values)
        return located_tensors


# --- This project -------------------------------------------------------------------------------------------


class MegatronActivationRecorder(ActivationRecorder):
    """Records the outputs of this rank's chunks during one step. Rank 0 compares those of all ranks."""

    def __init__(self, ddp_chunks: list[Any], layout: Layout, grid: ProcessGrid) -> None:
        super().__init__()
        self.grid = grid
        chunks = [chunk.module for chunk in ddp_chunks]
        self.sequence_parallel = chunks[0].config.sequence_parallel
        for stage, chunk in enumerate(chunks):
            if chunk.vision_model is not None:
                self._record_tower(chunk.vision_model)
            self._record_language_model(chunk, layout.chunk_layers(grid.pp_rank, stage))

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
                self.record_input(layer, TOKEN_EMBEDDINGS)
            self.record_output(layer, f"decoder layer {number}")
        if model_chunk.post_process:
            self.record_output(model_chunk.language_model.decoder.final_layernorm, FINAL_NORM)
            self.record_output(model_chunk.language_model.output_layer, LOGITS)

    def compare_activations(self, step_data: StepBatch, reference_dir: str, dtype: str) -> dict[str, Any]:
        """Removes the hooks and compares the outputs of all ranks. Collective.

        Args:
            step_data: the rows of the step.
            reference_dir: output of :mod:`toolkit.parity.reference_job`.

        Returns:
            On rank 0, {"activations": relative L2 error by location, "departs": the first location whose
            error is too large, or ""}; empty on the other ranks.
        """
        self.remove_hooks()
        local_values = self._local_contribution(step_data)
        self.recorded_values.clear()

        grid = self.grid
        key = (grid.dp_rank, grid.pp_rank, grid.cp_rank, grid.tp_rank)
        values_by_rank = gather_to_rank_0({key: local_values} if local_values else {}, grid)
        return compare_locations(values_by_rank, Path(reference_dir), dtype) if grid.rank == 0 else {}

    def _local_contribution(self, step_data: StepBatch) -> dict[str, Tensor]:
        """Maps "location/row" to the values [positions, width] that this rank contributes.

        The entries :data:`ROW_LENGTHS` and :data:`SELECTED_TOKENS` describe the rows. A rank without values
        has none of them.
        """
        local_values: dict[str, Tensor] = {}
        row_length = step_data.rows[0].tokens.numel()
        for location, recorded_rows in self.recorded_values.items():
            if not self._is_contributor(location):
                continue
            is_split = self.sequence_parallel and location != LOGITS
            token_count = row_length // self.grid.tp if is_split else row_length
            encoded_rows = self._encoded_rows(step_data)
            if location.startswith(VISION_LOCATIONS) and len(recorded_rows) < len(step_data.rows):
                row_numbers = encoded_rows  # the tower skipped the other rows
            else:
                row_numbers = list(range(len(step_data.rows)))

            for row_number, row_values in zip(row_numbers, recorded_rows, strict=True):
                row_values = row_values.reshape(-1, row_values.shape[-1])
                if not location.startswith(VISION_LOCATIONS):
                    # Cut off DeepStack's features, which follow the hidden state in the same tensor.
                    local_values[f"{location}/{row_number}"] = row_values[:token_count]
                elif row_number in encoded_rows:  # otherwise it is a dummy
                    local_values[f"{location}/{row_number}"] = row_values

        if local_values:
            local_values[ROW_LENGTHS] = torch.tensor([sum(lengths) for lengths in step_data.segment_lengths])
            for row_number, packed_row in enumerate(step_data.rows):
                selected = (
                    torch.arange(row_length) if packed_row.loss_index is None else packed_row.loss_index.cpu()
                )
                local_values[f"{SELECTED_TOKENS}/{row_number}"] = selected + self.grid.cp_rank * row_length

        return local_values

    def _encoded_rows(self, step_data: StepBatch) -> list[int]:
        """The rows of which this rank encodes pictures."""
        encoded_rows: list[int] = []
        for row_number, row in enumerate(step_data.rows):
            has_pictures = bool(step_data.vision_lengths[row_number][0])
            if has_pictures and (row.feature_route is None or row.feature_route.encodes):
                encoded_rows.append(row_number)
        return encoded_rows

    def _is_contributor(self, location: str) -> bool:
        """Whether this rank contributes values of a location.

        If all tensor-parallel ranks have the same values, only the first one contributes them.
        """
        is_split = location == LOGITS or self.sequence_parallel and not location.startswith(VISION_LOCATIONS)
        return is_split or self.grid.tp_rank == 0


def compare_locations(
    values_by_rank: Mapping[tuple[int, ...], Mapping[str, Tensor]], reference_dir: Path, dtype: str
) -> dict[str, Any]:
    """Returns the relative L2 errors of all locations and the first location that departs.

    Args:
        values_by_rank: maps (dp, pp, cp, tp) to the contribution of that rank.
        reference_dir: output of :mod:`toolkit.parity.reference_job`.
    """
    reference_facts = json.loads((reference_dir / "reference.json").read_text())
    reference_tensors = LazyTensorFile(reference_dir / "activations.safetensors")

    errors_by_location = {}
    for location in reference_tensors:
        errors_by_location[location] = _location_error(values_by_rank, reference_tensors, location)

    error_limit = partial(activation_limit, noise=reference_facts["activation_noise"], dtype=dtype)
    ordered_errors: dict[str, float] = {}
    first_departure = ""
    for location in reference_facts["order"]:
        if location in errors_by_location:
            ordered_errors[location] = errors_by_location[location]
            if not first_departure and not ordered_errors[location] <= error_limit(location):
                first_departure = location
    return {"activations": ordered_errors, "departs": first_departure}


def _location_error(
    values_by_rank: Mapping[tuple[int, ...], Mapping[str, Tensor]],
    reference_tensors: LazyTensorFile,
    location: str,
) -> float:
    """Returns the relative L2 error over all rows; infinite if positions are missing or not finite."""
    squared_difference = squared_scale = 0.0
    row_start = 0
    for actual_values, row_length, computed_indices in rows_at_location(values_by_rank, location):
        expected_values = reference_tensors.read_slice(location, row_start, row_start + row_length)
        if computed_indices is not None:
            expected_values = expected_values[computed_indices]
        row_difference, row_scale = squared_norms(actual_values, expected_values)
        squared_difference += row_difference
        squared_scale += row_scale
        row_start += row_length

    relative_error = math.sqrt(squared_difference / (squared_scale or 1.0))
    is_complete = row_start == reference_tensors[location].shape[0]
    return relative_error if is_complete and math.isfinite(relative_error) else math.inf


def activation_limit(location: str, *, noise: dict[str, float], dtype: str) -> float:
    """The largest relative error that a location may have against the fp32 reference.

    Args:
        noise: for bf16, the error of ``transformers`` in bf16 at each location.
    """
    if dtype == "float32":
        return ACTIVATION_TOLERANCE
    return BF16_ACTIVATION_RATIO * max(noise[location], BF16_ROUNDING)


def rows_at_location(
    values_by_rank: Mapping[tuple[int, ...], Mapping[str, Tensor]], location: str
) -> Iterator[tuple[Tensor, int, Tensor | None]]:
    """Yields the values of a location, row by row, in the order of the samples.

    Args:
        values_by_rank: maps (dp, pp, cp, tp) to the contribution of that rank.

    Yields:
        The computed values [computed positions, width]; the number of the row's positions, without padding;
        the indices of the computed positions, or None if all were computed.
    """
    location_prefix = f"{location}/"
    for dp_rank in sorted({key[0] for key in values_by_rank}):
        replica_values = {key: values_by_rank[key] for key in sorted(values_by_rank) if key[0] == dp_rank}
        row_numbers = set()
        for value_name in itertools.chain(*replica_values.values()):
            if value_name.startswith(location_prefix):
                row_numbers.add(int(value_name.removeprefix(location_prefix)))

        for row_number in sorted(row_numbers):
            value_name = f"{location_prefix}{row_number}"
            holder_values = {}
            for key, values in replica_values.items():
                if value_name in values:
                    holder_values[key] = values
            row_length = int(next(iter(holder_values.values()))[ROW_LENGTHS][row_number])
            if location == LOGITS:
                row_values, token_indices = _logits_of_row(
                    holder_values, value_name, f"{SELECTED_TOKENS}/{row_number}"
                )
                is_real_token = token_indices < row_length  # the rest of the row is padding
                yield row_values[is_real_token], row_length, token_indices[is_real_token]
                continue

            # Context-parallel ranks split the tokens and the frames, tensor-parallel ranks the tokens.
            row_values = torch.cat([rank_values[value_name] for rank_values in holder_values.values()])
            if location.startswith(VISION_LOCATIONS):
                yield row_values, len(row_values), None
            else:
                yield row_values[:row_length], row_length, None


def _logits_of_row(
    holder_values: Mapping[tuple[int, ...], Mapping[str, Tensor]], logits_name: str, indices_name: str
) -> tuple[Tensor, Tensor]:
    """The computed logits of a row, and the indices of their tokens.

    Tensor-parallel ranks split the vocabulary, and context-parallel ranks the tokens.
    """
    token_logits, token_indices = [], []
    for cp_rank in sorted({key[2] for key in holder_values}):
        vocabulary_ranks = [holder_values[key] for key in sorted(holder_values) if key[2] == cp_rank]
        vocabulary_logits = [rank_values[logits_name] for rank_values in vocabulary_ranks]
        token_logits.append(torch.cat(vocabulary_logits, dim=-1))
        token_indices.append(vocabulary_ranks[0][indices_name])
    return torch.cat(token_logits), torch.cat(token_indices)
