"""Builds the model of any run, stage by stage, in one process without memory, a GPU or other ranks.

Modules are made on torch's meta device, in torch's fake process groups, with the modules of the CPU platform.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megatron_vl.config import Fp8Config, TrainConfig, validate_config
from megatron_vl.estimate.split import run_layout
from megatron_vl.platform import Platform, get_platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout


@dataclass(frozen=True)
class BuiltTensor:
    """One parameter of a rank, under its canonical name."""

    tensor_name: str
    tensor_shape: tuple[int, ...]
    is_trained: bool


class _MetaPlatform(Platform):
    @property
    def device(self) -> torch.device:
        return torch.device("meta")


_TENSOR_FACTORIES = (torch.empty, torch.zeros, torch.ones)
"""The functions that create parameters. Computed constants (such as rotary frequencies) stay real."""


class _MetaDeviceMode(TorchFunctionMode):
    """Creates parameters on the meta device and keeps them there, whatever device is named."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _TENSOR_FACTORIES:
            kwargs["device"] = "meta"
        elif func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


def dry_build(config: TrainConfig, spec: ModelSpec, world_size: int) -> list[list[BuiltTensor]]:
    """The parameters of tensor rank 0 of each pipeline stage, taken from the real modules."""
    validate_config(config, world_size)
    layout = run_layout(config, spec, world_size)
    # Without CUDA-only settings that change no parameter, because the CPU platform refuses them.
    modules = [module for module in config.recompute.language_modules if module != "layernorm"]
    config = replace(config, fp8=Fp8Config(), recompute=replace(config.recompute, language_modules=modules))
    return [_build_rank(config, spec, layout, stage, world_size) for stage in range(layout.pp)]


def _build_rank(
    config: TrainConfig, spec: ModelSpec, layout: Layout, pipeline_stage: int, world_size: int
) -> list[BuiltTensor]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    cpu_platform = get_platform("cpu")
    from megatron_vl.parallel.process_grid import make_grid
    from megatron_vl.training.model import HALF_PIXEL_NORM, build_model

    meta_platform = _MetaPlatform(
        cpu_platform.name, cpu_platform.distributed_backend, cpu_platform.has_transformer_engine
    )
    rank = pipeline_stage * world_size // layout.pp
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        grid = make_grid(layout)
        assert (grid.pp_rank, grid.tp_rank, grid.dp_rank) == (pipeline_stage, 0, 0)
        with _MetaDeviceMode():
            _, live = build_model(config, spec, layout, meta_platform, grid, pixel_norm=HALF_PIXEL_NORM)
        return [BuiltTensor(name, tuple(each.shape), each.requires_grad) for name, each, _ in live]
    finally:
        from megatron.core import parallel_state as mpu

        mpu.destroy_model_parallel()
        dist.destroy_process_group()
