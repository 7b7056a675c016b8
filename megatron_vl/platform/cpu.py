"""Makes Megatron-core 0.19.2 run on a machine without a GPU.

Core asks ``torch.cuda`` for devices, streams and RNG states, creates tensors with ``device="cuda"`` and
compares type strings with ``torch.cuda.FloatTensor``. This module redirects all of these to the CPU. It
replaces functions of ``torch.cuda``, and a :class:`TorchFunctionMode` handles factories and tensor methods,
outside of a model's passes.
It is not loaded on CUDA.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_vl.core_fixes.gloo_threads import use_one_gloo_worker


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _CpuStream:
    """A stream on which every operation is finished when its call returns, as on the CPU."""

    cuda_stream = 0
    __init__ = wait_stream = wait_event = synchronize = _do_nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _CpuEvent()

    def query(self) -> bool:
        return True


class _CpuEvent:
    __init__ = record = wait = synchronize = _do_nothing

    def query(self) -> bool:
        return True


def _is_cuda_device(device: Any) -> bool:
    """Whether ``device``, a string, a torch.device or an index, means a GPU."""
    if isinstance(device, int):
        return not isinstance(device, bool)
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


_TENSOR_TYPE = torch.Tensor.type
_TENSOR_CUDA = torch.Tensor.cuda
_TENSOR_TO = torch.Tensor.to
_REDIRECTED_METHODS = frozenset((_TENSOR_TYPE, _TENSOR_CUDA, _TENSOR_TO))


class CudaOnCpu(TorchFunctionMode):
    """Redirects tensor factories and methods that name a CUDA device to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Thousands of operations of a step come through here. Nearly all of them need only two comparisons.
        if kwargs:
            device = kwargs.get("device")
            if device is not None and _is_cuda_device(device):
                kwargs = {**kwargs, "device": "cpu"}
        if func in _REDIRECTED_METHODS:
            if func is _TENSOR_CUDA:
                return args[0]
            if func is _TENSOR_TYPE and len(args) == 1 and not kwargs:
                # Core decides by the type string whether a parameter gets master weights.
                return func(*args).replace("torch.", "torch.cuda.", 1)
            if func is _TENSOR_TO and len(args) > 1 and _is_cuda_device(args[1]):
                args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs) if kwargs else func(*args)


def _get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


_installed_mode: CudaOnCpu | None = None


def install_cpu_platform() -> None:
    """Redirects core's CUDA calls to the CPU for the life of the process. A second call does nothing."""
    global _installed_mode
    if _installed_mode is not None:
        return
    if torch.cuda.is_available():
        # If the machine has a GPU, core's imports would initialise it. The user's own setting takes
        # precedence.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        # Core's functions were then compiled while it was imported, and Dynamo fails within the mode below.
        torch.compiler.set_stance("force_eager")
    # Core warns at every start unless this is set. Without a GPU the value has no effect.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _patch_torch_cuda()
    _patch_core_rng()
    _avoid_transformer_engine()
    use_one_gloo_worker()
    _installed_mode = CudaOnCpu()
    _installed_mode.__enter__()
    _leave_passes_alone()


def _leave_passes_alone() -> None:
    """Keeps the mode away from the passes of a model, which name no device: a seventh of their time."""
    from megatron.core.pipeline_parallel import schedules

    def without_mode(run_pass: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run_pass)
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return run_pass(*args, **kwargs)

        return run

    schedules.forward_step = without_mode(schedules.forward_step)
    schedules.backward_step = without_mode(schedules.backward_step)


def _patch_torch_cuda() -> None:
    stream = _CpuStream()
    cpu_functions: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "device_count": lambda: 1,
        "synchronize": _do_nothing,
        "empty_cache": _do_nothing,
        "set_device": _do_nothing,
        "manual_seed": torch.manual_seed,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream=None: contextlib.nullcontext(),
        "Stream": _CpuStream,
        "Event": _CpuEvent,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": _do_nothing,
        "is_current_stream_capturing": lambda: False,
    }

    for function_name, cpu_function in cpu_functions.items():
        setattr(torch.cuda, function_name, cpu_function)


def _patch_core_rng() -> None:
    import logging

    from megatron.core.tensor_parallel import random as core_random

    # The CPU has only one generator, so core would always warn that the CPU RNG state changed within a GPU
    # RNG context.
    logging.getLogger(core_random.__name__).setLevel(logging.ERROR)

    core_random._get_cuda_rng_state = _get_rng_state
    core_random._set_cuda_rng_state = _set_rng_state


def _avoid_transformer_engine() -> None:
    """Gives core what it takes where Transformer Engine, whose kernels need a GPU, is missing."""
    from megatron.core import optimizer as core_optimizer
    from megatron.core import utils as core_utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as mixed_precision
    from megatron.core.transformer.moe import moe_utils

    core_optimizer.Adam = torch.optim.AdamW
    core_optimizer.USING_PYTORCH_OPTIMIZER = True
    clip_grads.multi_tensor_applier = core_utils.local_multi_tensor_applier
    clip_grads.l2_norm_impl = core_utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_impl = core_utils.local_multi_tensor_scale
    clip_grads.multi_tensor_scale_tensor_impl = None
    mixed_precision.multi_tensor_applier = core_utils.local_multi_tensor_applier
    mixed_precision.multi_tensor_scale_impl = core_utils.local_multi_tensor_scale
    moe_utils.te_general_gemm = None
