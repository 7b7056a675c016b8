"""Compares the output of every layer with ``transformers`` and names the first layer that departs.

Hooks on both sides record the outputs at each location of the forward pass, such as "vision layer 3". Patches
are in the tower's order in both. Tokens are those of all samples, one after another, without padding. Logits
are compared where the trainer computes them (:func:`megatron_vl.data.packing.training_row.loss_index`).
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from megatron_vl.spec.families import ModelSpec
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.trainer import Trainer

from .errors import ErrorSums
from .tolerances import ACTIVATION_TOLERANCE, BF16_RATIO, BF16_ROUNDING

PATCH_EMBEDDING, VISION_MERGER, LOGITS = "patch embedding", "merger", "logits"
VISION_LOCATIONS = (PATCH_EMBEDDING, VISION_MERGER, "vision layer", "DeepStack merger")


class ActivationRecorder:
    """Hooks on modules. Each copies a value to the host when the module is called."""

    def __init__(self) -> None:
        # Maps each location, in the order of the hooks, to its values in the order of the calls.
        self.recorded_values: dict[str, list[Tensor]] = {}
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
        for hook_handle in self._hook_handles:
            hook_handle.remove()


def _keep(values: list[Tensor], module_value: Any) -> None:
    module_value = module_value[0] if isinstance(module_value, tuple) else module_value
    # Always copy: pipeline stages free the memory of what they have sent.
    values.append(module_value.detach().to("cpu", copy=True))


class HfActivationRecorder(ActivationRecorder):
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
        recorded = {name: [v.flatten(0, -2) for v in values] for name, values in self.recorded_values.items()}
        return {name: torch.cat(values) for name, values in recorded.items() if values}


class MegatronActivationRecorder(ActivationRecorder):
    """Records the outputs of this rank's chunks during one step, and compares them."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.grid = trainer.grid
        chunks = [chunk.module for chunk in trainer.model_chunks]
        self.sequence_parallel = chunks[0].config.sequence_parallel
        for number, chunk in enumerate(chunks):
            if (tower := chunk.vision_model) is not None:
                self.record_input(tower.decoder.layers[0], PATCH_EMBEDDING)
                for i, layer in enumerate(tower.decoder.layers):
                    self.record_output(layer, f"vision layer {i}")
                for k, deepstack_merger in enumerate(tower.deepstack_mergers):
                    self.record_output(deepstack_merger, f"DeepStack merger {k}")
                self.record_output(tower.merger, VISION_MERGER)
            layer_numbers = trainer.layout.chunk_layers(self.grid.pp_rank, number)
            for i, layer in zip(layer_numbers, chunk.language_model.decoder.layers, strict=True):
                if i == 0:
                    self.record_input(layer, "embeddings")
                self.record_output(layer, f"decoder layer {i}")
            if chunk.post_process:
                self.record_output(chunk.language_model.decoder.final_layernorm, "final norm")
                self.record_output(chunk.language_model.output_layer, LOGITS)

    def compare(
        self, step_batch: StepBatch, row_lengths: list[int], reference_dir: Path, dtype: str
    ) -> dict[str, Any]:
        """Removes the hooks and compares the outputs of all ranks. Collective.

        Args:
            step_batch: this rank's rows of the step.
            row_lengths: number of tokens of each row of the global batch, without padding.
            reference_dir: output of :mod:`toolkit.parity.reference_job`.

        Returns:
            {"activations": relative L2 error by location in forward order, "departs": the first location
            whose error is too large, or ""}.
        """
        self.remove_hooks()
        facts = json.loads((reference_dir / "reference.json").read_text())
        sums = ErrorSums[str]()
        with safe_open(reference_dir / "activations.safetensors", framework="pt") as tensor_file:
            expected = {location: tensor_file.get_slice(location) for location in facts["order"]}
            self._add_tower(sums, step_batch, expected)
            self._add_language_model(sums, step_batch, row_lengths, expected)
        sums.gather()

        errors = {name: sums.error(name, math.prod(part.get_shape())) for name, part in expected.items()}
        limits = dict.fromkeys(errors, ACTIVATION_TOLERANCE)
        if dtype == "bfloat16":  # against the fp32 reference
            for name, noise in facts["activation_noise"].items():
                limits[name] = BF16_RATIO * max(noise, BF16_ROUNDING)
        departures = [name for name, error in errors.items() if not error <= limits[name]]
        return {"activations": errors, "departs": departures[0] if departures else ""}

    def _add_tower(self, sums: ErrorSums[str], step_batch: StepBatch, expected: dict[str, Any]) -> None:
        """Adds the errors of patches and merge units. Context-parallel ranks split the frames of a row."""
        grid, num_rows = self.grid, len(step_batch.rows)
        encoded_rows = [  # the rows of which this rank encodes images
            i
            for i, (row, lengths) in enumerate(zip(step_batch.rows, step_batch.vision_lengths, strict=True))
            if lengths[0] and (row.feature_route is None or row.feature_route.encodes)
        ]
        own_values: dict[tuple[str, int, int], Tensor] = {}
        for location, recorded_rows in self.recorded_values.items():
            if not location.startswith(VISION_LOCATIONS) or grid.tp_rank:
                continue  # all tensor-parallel ranks have the same values
            # The tower skipped rows without images, or encoded a dummy.
            called_rows = encoded_rows if len(recorded_rows) < num_rows else range(num_rows)
            for row_number, values in zip(called_rows, recorded_rows, strict=True):
                if row_number in encoded_rows:
                    key = location, grid.dp_rank * num_rows + row_number, grid.cp_rank
                    own_values[key] = values.flatten(0, -2)

        lengths_by_rank: list[dict[tuple[str, int, int], int]] = [{}] * grid.world_size
        dist.all_gather_object(lengths_by_rank, {key: len(values) for key, values in own_values.items()})
        starts: dict[str, int] = {}
        for key, length in sorted(item for lengths in lengths_by_rank for item in lengths.items()):
            start = starts.get(key[0], 0)
            starts[key[0]] = start + length
            if key in own_values:
                sums.add(key[0], own_values[key], expected[key[0]][start : start + length])

    def _add_language_model(
        self, sums: ErrorSums[str], step_batch: StepBatch, row_lengths: list[int], expected: dict[str, Any]
    ) -> None:
        """Adds the errors of real tokens. Context and sequence parallelism split the tokens of a row, and
        tensor parallelism the vocabulary."""
        grid, row_tokens = self.grid, step_batch.rows[0].tokens.numel()
        for location, recorded_rows in self.recorded_values.items():
            is_split = self.sequence_parallel and location != LOGITS
            if location.startswith(VISION_LOCATIONS) or grid.tp_rank and not is_split and location != LOGITS:
                continue
            own_tokens = row_tokens // grid.tp if is_split else row_tokens
            first_token = grid.cp_rank * row_tokens + (grid.tp_rank * own_tokens if is_split else 0)
            for row_number, (row, values) in enumerate(zip(step_batch.rows, recorded_rows, strict=True)):
                global_row = grid.dp_rank * len(step_batch.rows) + row_number
                num_real = min(row_lengths[global_row] - first_token, own_tokens)
                if num_real <= 0:
                    continue  # padding alone
                start = sum(row_lengths[:global_row]) + first_token
                expected_values = expected[location][start : start + num_real]
                values = values.flatten(0, -2)
                if location == LOGITS:
                    selected = torch.arange(row_tokens) if row.loss_index is None else row.loss_index.cpu()
                    width = values.shape[1]
                    columns = slice(grid.tp_rank * width, (grid.tp_rank + 1) * width)
                    numel = expected_values[:, columns].numel()
                    expected_values = expected_values[selected[selected < num_real], columns]
                    values = values[selected < num_real]
                else:
                    # DeepStack's features follow the hidden state in the same tensor.
                    values, numel = values[:num_real], expected_values.numel()
                sums.add(location, values, expected_values, numel)
