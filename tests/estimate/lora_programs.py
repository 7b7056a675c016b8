"""What a separate process runs for :mod:`tests.estimate.test_lora`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_vl.config import parse_config
from megatron_vl.spec.families import read_spec
from tests.support.dry_build import dry_build
from tests.support.tiny_trainer import trainer_of
from toolkit.parity.case import draw_samples, pack_step


def built_parameters(hf: dict[str, str], runs: list[list[Any]]) -> list[list[list[int]]]:
    """[parameters, trained ones] of each stage, for each run [family, ranks, options]."""
    counts = []
    for family, ranks, options in runs:
        stages = dry_build(parse_config(options.split()), read_spec(hf[family]), ranks)
        counts.append([_count(stage) for stage in stages])
    return counts


def kept_by_tower(hf: str, weights: str, targets: list[list[str]]) -> list[float]:
    """Bytes of a patch that autograd keeps of a pass through the tower, for each list of targets.

    Parameters are left out, and views of one tensor count once.
    """
    kept_bytes = []
    for names in targets:
        live = trainer_of(hf, lora={"rank": 4, "targets": names})
        [row] = pack_step(live, draw_samples([["image"]], live.spec, 0)).rows
        tower = live.model_chunks[0].module.vision_model
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            features = tower(row.vision_input)
        for parameter in tower.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        byte_count = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        kept_bytes.append(byte_count / len(row.vision_input.position_hw))
        assert features[0].requires_grad == bool(kept)
    return kept_bytes


def _count(built_tensors: list[Any]) -> list[int]:
    sizes = [math.prod(tensor.tensor_shape) for tensor in built_tensors]
    trained = [size for size, tensor in zip(sizes, built_tensors, strict=True) if tensor.is_trained]
    return [sum(sizes), sum(trained)]
