"""What a separate process runs for :mod:`tests.planning.test_lora`."""

from __future__ import annotations

import math
from typing import Any

from megatron_vl.config import parse_config
from megatron_vl.spec.families import read_spec
from toolkit.plan.dry_build import dry_build


def built_parameters(hf: dict[str, str], runs: list[list[Any]]) -> list[list[list[int]]]:
    """[parameters, trained ones, trained tensors] of each stage, for each run [family, ranks, options]."""
    counts = []
    for family, ranks, options in runs:
        stages = dry_build(parse_config(options.split()), read_spec(hf[family]), ranks)
        counts.append([_count(stage) for stage in stages])
    return counts


def _count(built_tensors: list[Any]) -> list[int]:
    sizes = [math.prod(tensor.tensor_shape) for tensor in built_tensors]
    trained = [size for size, tensor in zip(sizes, built_tensors, strict=True) if tensor.is_trained]
    return [sum(sizes), sum(trained), len(trained)]
