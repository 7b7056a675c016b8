"""Estimates a run's tokens per second from its model's FLOPs and measurements on
H200 (``docs/log/2026-11.md``, 2026-11-21).

The rows are those of ``megatron-vl bench``: pictures of 640 x 480 pixels, each with 150 tokens of text, as
many as fit into a row. The assumed share of the peak (MFU) is the one measured for the nearest layout,
reduced by recomputation and an idle pipeline. The cost of a network between nodes is not included.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vl.config import TrainConfig, validate
from megatron_vl.planning.flops import recompute_flops, row_flops
from megatron_vl.spec.families import ModelSpec

PEAK = 989e12
"""FLOP/s of H100 and H200 in bfloat16."""
PICTURE = (640, 480)
"""Width and height in pixels."""
TEXT = 150
"""Tokens of text per picture, and two that frame it; the second half has loss."""
DENSE = 0.50
"""Qwen2.5-VL-7B, data parallel alone, image rows: 50.1 %."""
DENSE_NARROW = 0.46
"""Qwen2.5-VL-3B (hidden size 2048), the same: 46.1 %."""
DENSE_TENSOR = 0.39
"""Qwen2.5-VL-7B cut to 8 + 8 layers, TP2 with sequence parallelism: 39.0 %."""
EXPERTS = 0.19
"""Qwen3-VL-30B-A3B cut to a quarter, EP2, rows of 8192 tokens: 18.8 %."""
EXPERTS_LONG = 0.34
"""The same with rows of 32,768 tokens: 34.2 %."""


@dataclass(frozen=True)
class Speed:
    """An estimated speed."""

    mfu: float
    tokens_per_second: float
    """Tokens per second of the whole run."""

    @property
    def hours_per_billion_tokens(self) -> float:
        return 1e9 / self.tokens_per_second / 3600


def estimate_speed(config: TrainConfig, spec: ModelSpec, world_size: int) -> Speed:
    """Estimates the speed on H200 in bfloat16.

    Raises:
        RunConfigError: the run is impossible.
    """
    dp = validate(config, world_size)
    p = config.parallel
    lengths, patches, windows, head = _row(config, spec)
    needed = row_flops(spec, config.model, lengths, patches, windows, head).total
    again = recompute_flops(
        spec,
        config.model,
        config.recompute,
        lengths,
        patches,
        windows,
        config.vision.placement == "decoupled",
    ).total

    passes = config.global_batch_size // dp * p.vpp
    busy = passes / (passes + p.pp - 1)
    mfu = _measured(config, spec) * needed / (needed + again) * busy
    return Speed(mfu, mfu * PEAK * world_size * sum(lengths) / needed)


def _measured(config: TrainConfig, spec: ModelSpec) -> float:
    """MFU of the nearest measured run, without recomputation and without an idle pipeline."""
    tensor = DENSE_TENSOR / DENSE if config.parallel.tp > 1 else 1.0
    if spec.language.moe is not None:
        return tensor * (EXPERTS_LONG if config.data.seq_len >= 32768 else EXPERTS)
    return tensor * (DENSE_NARROW if spec.language.hidden_size < 3072 else DENSE)


def _row(config: TrainConfig, spec: ModelSpec) -> tuple[list[int], list[int], list[int], int]:
    """Document lengths, patches of each picture, patches of each window, and loss tokens of one row."""
    v = spec.vision
    unit = v.patch_size * v.spatial_merge_size
    width, height = (round(side / unit) for side in PICTURE)
    tokens = width * height
    document = tokens + 2 + TEXT
    count = max(1, config.data.seq_len // document)
    patches = tokens * v.merge_unit
    side = max(1, v.window_size // unit) if v.window_size else 0
    windows = [patches]
    if side:
        sides = [
            [min(side, length - start) for start in range(0, length, side)] for length in (width, height)
        ]
        windows = [w * h * v.merge_unit for w in sides[0] for h in sides[1]]
    return [document] * count, [patches] * count, windows * count, count * TEXT // 2
