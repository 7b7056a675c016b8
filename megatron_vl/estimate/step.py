"""Predicts the time of a step in closed form, and with it MFU and tokens per second.

A stage takes, for a row, the FLOPs of its parts (what is computed twice included) over what each part reaches
on the GPU, and the messages of tensor, context and expert parallelism, which nothing hides. A step takes the
slowest stage's rows, times 1 + the bubble of the schedule, and the offloaded state that no pass hides.
"""

import functools
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_vl.config import LoraConfig, TrainConfig, validate_config
from megatron_vl.estimate.flops import RowFlops, RowSizes, needed_flops
from megatron_vl.estimate.gpus import Efficiencies, Gpu, find_gpu, reserve_gib
from megatron_vl.estimate.memory import GIB, StageMemory, peak_stage_gib, stage_memories
from megatron_vl.estimate.parameters import (
    LayerKind,
    bytes_per_element,
    layer_kinds,
    mean_ranks_per_token,
    offloaded_fraction,
    optimizer_state_bytes,
    stage_parameters,
)
from megatron_vl.estimate.rows import assumed_rows, executed_flops
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, key_value_copies
from megatron_vl.spec.lora import freeze_parts_without_lora

GPUS_PER_NODE = 8


@functools.lru_cache(maxsize=256)
def _layer_computation(flops: RowFlops, efficiencies: Efficiencies) -> list[float]:
    return [
        layer.dense / efficiencies.decoder
        + layer.experts / efficiencies.experts
        + layer.delta_rule / efficiencies.delta_rule
        for layer in flops.layers
    ]


@dataclass(frozen=True)
class RunPrediction:
    config: TrainConfig
    spec: ModelSpec
    layout: Layout
    dp: int
    gpu: Gpu
    rows: RowSizes
    flops: RowFlops
    """Those of a row that are executed."""

    @cached_property
    def micro_batches(self) -> int:
        """Rows of a replica in a step."""
        return self.config.global_batch_size // self.dp

    @cached_property
    def step_seconds(self) -> float:
        pipeline_seconds = self.micro_batches * max(self.stage_seconds) * (1 + self.bubble)
        return pipeline_seconds + self.decoupled_seconds + self.offload_seconds

    @cached_property
    def bubble(self) -> float:
        """Time in which the slowest stage waits, as a share of its passes: one row of each other stage."""
        slowest_seconds = max(self.stage_seconds)
        fill_seconds = (sum(self.stage_seconds) - slowest_seconds) / self.layout.vpp
        return fill_seconds / (self.micro_batches * slowest_seconds)

    @cached_property
    def stage_seconds(self) -> list[float]:
        """Seconds of both passes of a row on each stage."""
        layer_seconds, output_seconds, tower_seconds = self._part_seconds
        stages = self.layout.stage_sums(layer_seconds)
        stages[0] += 0.0 if self.layout.decoupled else tower_seconds
        stages[-1] += output_seconds
        return stages

    @cached_property
    def decoupled_seconds(self) -> float:
        """Seconds in which all ranks run the tower, before and after the pipeline."""
        tower_seconds = self._part_seconds[2] if self.layout.decoupled else 0.0
        return self.micro_batches * tower_seconds / self.layout.replica_ranks

    @cached_property
    def _part_seconds(self) -> tuple[list[float], float, float]:
        """Seconds of both passes of a row: of each decoder layer, of the output layer, of the tower."""
        layout, flops, efficiencies = self.layout, self.flops, self.gpu.efficiencies
        peak_flops = 1e12 * self.gpu.peak_tflops
        # All ranks of a stage share a row, but with a tower on every rank each encodes its own images.
        stage_flops = peak_flops * layout.tp * layout.cp
        tower_flops = peak_flops if layout.decoupled else stage_flops
        kinds = layer_kinds(self.spec, LoraConfig())  # no message carries adapters
        seconds_by_kind = {kind: self._message_seconds(kind) for kind in set(kinds)}
        layers = zip(_layer_computation(flops, efficiencies), kinds, strict=True)
        layer_seconds = [compute / stage_flops + seconds_by_kind[kind] for compute, kind in layers]
        output_seconds = flops.output / efficiencies.output / stage_flops
        tower_seconds = flops.tower / efficiencies.tower / tower_flops + self._tower_message_seconds()
        return layer_seconds, output_seconds, tower_seconds

    # --- Messages -------------------------------------------------------------------------------------------

    def _exchange_seconds(self, byte_count: float, rank_count: int, rank_stride: int = 1) -> float:
        """Seconds of a collective of ranks ``rank_stride`` apart, in which all but one receive their share.

        Between nodes, the ranks of one node share the adapters of the GPUs that lie between them.
        """
        gb_s = self.gpu.link_gb_s
        if rank_count * rank_stride > GPUS_PER_NODE:
            gb_s = min(gb_s, self.gpu.network_gb_s * max(1, GPUS_PER_NODE // rank_stride))
        return byte_count * (rank_count - 1) / rank_count / (1e9 * gb_s)

    def _message_seconds(self, kind: LayerKind) -> float:
        """Seconds of the messages of a decoder layer in all its passes of a row."""
        layout, language_spec = self.layout, self.spec.language
        token_bytes = bytes_per_element(self.config) * self.config.data.seq_len / layout.cp
        row_bytes = token_bytes * language_spec.hidden_size
        # Two all-gathers and two reduce-scatters, or two all-reduces.
        seconds = 4 * self._exchange_seconds(row_bytes, layout.tp)
        if layout.cp > 1:
            seconds += self._context_seconds(kind, token_bytes)
        if kind.has_experts and language_spec.moe is not None:
            rank_bytes = row_bytes / (layout.tp if self.config.parallel.sequence_parallel else 1)
            copies = mean_ranks_per_token(language_spec.moe.num_experts, language_spec.moe.top_k, layout.ep)
            seconds += 2 * self._exchange_seconds(copies * rank_bytes, layout.ep, layout.etp)
            seconds += 2 * self._exchange_seconds(layout.etp * rank_bytes, layout.etp)
        return seconds * (3 if self.config.recompute.language == "full" else 2)

    def _context_seconds(self, kind: LayerKind, token_bytes: float) -> float:
        """Seconds in which ranks that share a row exchange heads and gather keys, or states, in one pass."""
        layout, language_spec, linear = self.layout, self.spec.language, self.spec.language.linear_attention
        if kind.has_linear_attention and linear is not None:
            state_bytes = 4 * linear.state_exchange_size * layout.cp / layout.tp
            return self._exchange_seconds(state_bytes, layout.cp, layout.tp)
        local_heads = max(1, language_spec.num_kv_heads // layout.tp)
        key_width = local_heads * key_value_copies(local_heads, layout.head_ranks) * language_spec.head_dim
        query_width = language_spec.num_heads * language_spec.head_dim / layout.tp
        head_bytes = token_bytes * (2 * query_width + 2 * key_width)
        return self._exchange_seconds(head_bytes, layout.head_ranks, layout.tp) + self._exchange_seconds(
            2 * token_bytes * key_width * layout.key_ranks, layout.key_ranks, layout.tp * layout.head_ranks
        )

    def _tower_message_seconds(self) -> float:
        """Seconds of the all-reduces of a tower that ranks share, in all its passes of a row."""
        if self.layout.decoupled:
            return 0.0
        patch_bytes = bytes_per_element(self.config) * self.rows.patches * self.spec.vision.hidden_size
        is_frozen = freeze_parts_without_lora(self.config, self.spec).model.freeze_vision
        passes = 1 if is_frozen else 2 + (self.config.recompute.vision == "full")
        layer_seconds = 4 * self._exchange_seconds(patch_bytes / self.layout.cp, self.layout.tp)
        return passes * self.spec.vision.num_layers * layer_seconds

    @cached_property
    def offload_seconds(self) -> float:
        """Seconds of the copies of offloaded state that no pass hides.

        State is copied to the GPU and back at once. A forward pass, a third of a row, hides copies.
        """
        if not (offload_share := offloaded_fraction(self.config)):
            return 0.0
        _, state_bytes = optimizer_state_bytes(self.config)
        counts_by_stage = stage_parameters(self.config, self.spec, self.layout, self.dp)
        stages, bandwidth = zip(counts_by_stage, self.stage_seconds, strict=True), 1e9 * self.gpu.host_gb_s
        return max(
            max(0.0, state_bytes * counts.owned_count * offload_share / bandwidth - row_seconds / 3)
            for counts, row_seconds in stages
        )

    # --- Memory and results ---------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> list[StageMemory]:
        return [*stage_memories(self.config, self.spec, self.layout, self.dp)]

    @property
    def peak_gib(self) -> float:
        return peak_stage_gib(self.stages)

    @property
    def host_gib(self) -> float:
        """Host memory for each GPU, as the start of a run counts it."""
        state_bytes = max(stage.host_bytes for stage in self.stages)
        return (state_bytes + max(stage.host_input_bytes for stage in self.stages)) / GIB

    @property
    def fits_memory(self) -> bool:
        return self.first_stages_fit(None)

    def first_stages_fit(self, stage_count: int | None) -> bool:
        """Whether so many stages (None: all) do. The first that does not ends it."""
        most_gib = self.gpu.memory_gib - reserve_gib(self.gpu.memory_gib)
        stages = stage_memories(self.config, self.spec, self.layout, self.dp)
        return all(stage.total_bytes / GIB <= most_gib for stage in itertools.islice(stages, stage_count))

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of the whole run in a second."""
        return self.config.global_batch_size * self.rows.tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """FLOPs that training needs, as a share of the peak, counted as the trainer and ``bench`` do."""
        config = self.config
        needed = needed_flops(self.spec, config, self.rows)
        peak_flops = self.layout.replica_ranks * self.dp * 1e12 * self.gpu.peak_tflops
        return config.global_batch_size * needed.total / (self.step_seconds * peak_flops)

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": {**self.layout.as_dict(), "dp": self.dp},
            "step_s": round(self.step_seconds, 4),
            "bubble": round(self.bubble, 4),
            "mfu": round(self.mfu, 4),
            "tokens_per_second": round(self.tokens_per_second),
            "peak_gib": round(self.peak_gib, 1),
            "host_gib": round(self.host_gib, 1),
            "fits": self.fits_memory,
            "gpu": self.gpu.name,
            "measured": self.gpu.is_measured,
            "stages": [stage.as_json() for stage in self.stages],
        }


def predict_layout(
    config: TrainConfig,
    spec: ModelSpec,
    world_size: int,
    layout: Layout,
    gpu: Gpu | None = None,
    rows: RowSizes | None = None,
) -> RunPrediction:
    """Predicts a run under a layout; by default on H200, with the assumed rows.

    Raises:
        RunConfigError: the run is impossible.
    """
    dp, rows = validate_config(config, world_size), rows or assumed_rows(config, spec)
    flops = executed_flops(config, spec, rows)
    return RunPrediction(config, spec, layout, dp, gpu or find_gpu(), rows, flops)
