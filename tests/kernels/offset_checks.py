"""Finds the largest offset of every kernel over rows of 2^20 tokens, without their memory; prints JSON.

    TRITON_INTERPRET=1 python -m tests.kernels.offset_checks

Tensors on the device ``meta`` get addresses that nothing lies at. Of each launch, only the last program is
interpreted, and of a long loop the first and the last two steps. An access has to be within a tensor of the
launch. A product of sizes beyond 32 bits that is taken in 32 bits leads elsewhere. The result has the largest
offset in elements of each kernel. The program fails if an access or a grid is wrong.

Not here: the kernels of the optimizer, whose offsets do not depend on rows, but on chunks of state.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_vl.kernels.attention.tower_attention import tower_attention
from megatron_vl.kernels.attention.window_attention import window_attention
from megatron_vl.kernels.experts.grouped_gemm import TilePlan, plan_tiles, row_product, weight_product
from megatron_vl.kernels.experts.token_copies_triton import (
    gather_parts,
    scatter_parts,
    scatter_rows,
    sum_rows,
)
from megatron_vl.kernels.layers.biased_layers import biased_activation, biased_sum, column_sums_and_rows
from megatron_vl.kernels.layers.fp8_rows import quantize_rows
from megatron_vl.kernels.layers.fp8_swiglu import swiglu_in_fp8
from megatron_vl.kernels.layers.residual_norm import residual_norm
from megatron_vl.kernels.layers.swiglu import swiglu
from megatron_vl.kernels.linear_attention import causal_conv_triton, gated_norm_triton
from megatron_vl.kernels.linear_attention.gated_delta_rule_triton import gated_delta_rule
from tests.kernels.triton_checks import fix_interpreter

TOKENS = 2**20
PATCHES = 4 * TOKENS + 120
"""A row of pictures alone; the last segment has its own tile."""
LARGEST_GRID = (2**31 - 1, 65535, 65535)
REGION = 2**44
"""Distance of the addresses of two tensors in bytes."""

WEIGHTS = 8 * REGION
"""The address of weights of which only the address is known. Nothing lies next to it."""

largest_offsets: dict[str, int] = {}
faults: list[str] = []


class Launch:
    """The tensors of a launch and where they lie."""

    def __init__(self, name: str, arguments: list[Any]) -> None:
        self.name = name
        self.real: list[tuple[int, int]] = []
        """Begin and end of each tensor in memory."""
        self.absent: dict[int, tuple[int, int, int]] = {}
        """For each storage on the device meta its begin and end, and the size of an element."""
        for argument in arguments:
            tensor = argument.base if isinstance(argument, TensorDescriptor) else argument
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if tensor.device.type != "meta":
                self.real.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
            elif storage._cdata not in self.absent:
                begin = REGION * (len(self.absent) + 16)
                self.absent[storage._cdata] = begin, begin + storage.nbytes(), tensor.element_size()

    def address(self, tensor: Tensor) -> int:
        if tensor.device.type != "meta":
            return tensor.data_ptr()
        begin, *_ = self.absent[tensor.untyped_storage()._cdata]
        return begin + tensor.storage_offset() * tensor.element_size()

    def check(self, pointers: np.ndarray, mask: np.ndarray) -> bool:
        """Notes the offsets of an access. Returns whether all of it is in memory that exists."""
        used = np.broadcast_to(pointers, mask.shape)[np.asarray(mask, dtype=bool)]
        if not used.size:
            return False
        low, high = int(used.min()), int(used.max())
        if any(begin <= low and high < end for begin, end in self.real):
            return True
        base = low // REGION * REGION
        if base == WEIGHTS:
            return False
        ends = {begin: (end, size) for begin, end, size in self.absent.values()}
        end, size = ends.get(base, (base, 1))
        first, last = (low - base) // size, (high - base) // size
        if high >= end:
            faults.append(f"{self.name}: offsets {first} to {last} of a tensor")
        largest_offsets[self.name] = max(largest_offsets.get(self.name, 0), last)
        return False


launch: Launch


def run_last_program(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """In place of ``InterpretedFunction.run``."""
    global launch
    if kernel.fn not in kernel.rewritten_fn:
        kernel.rewritten_fn[kernel.fn] = kernel.rewriter.rewrite_ast()
    function = kernel.rewritten_fn[kernel.fn]
    grid = (*grid, *(1,) * (3 - len(grid)))
    if any(size > limit for size, limit in zip(grid, LARGEST_GRID, strict=True)):
        faults.append(f"{kernel.__name__}: a grid of {grid}")
    named = {name: value for name, value in named.items() if name in kernel.arg_names}
    values = inspect.getcallargs(function, *arguments, **named)
    launch = Launch(f"{function.__module__.rpartition('.')[2]}.{kernel.fn.__name__}", list(values.values()))
    executor = interpreter.GridExecutor(function, kernel.arg_names, grid)
    scope = interpreter._patch_lang(function)
    try:
        converted = {
            name: value if name in executor.constexprs else _convert(value) for name, value in values.items()
        }
        interpreter.interpreter_builder.set_grid_dim(*grid)
        interpreter.interpreter_builder.set_grid_idx(*(size - 1 for size in grid))
        function(**converted)
    finally:
        scope.restore()


def _convert(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        strides = [interpreter._implicit_cvt(stride) for stride in value.strides[:-1]]
        return interpreter.TritonSemantic(interpreter.InterpreterBuilder()).make_tensor_descriptor(
            base=_convert(value.base),
            shape=[interpreter._implicit_cvt(size) for size in value.shape],
            strides=[*strides, tl.constexpr(1)],
            block_shape=[tl.constexpr(size) for size in value.block_shape],
            padding_option=value.padding,
        )
    if isinstance(value, Tensor):
        element = interpreter.triton.runtime.jit.mangle_type(value)
        pointer_type = tl.str_to_ty(element, None)
        handle = interpreter.TensorHandle(np.array([launch.address(value)], dtype=np.uint64), pointer_type)
        return tl.tensor(handle, pointer_type)
    return interpreter._implicit_cvt(value)


def _number(bound: Any) -> int:
    return int(np.asarray(bound.handle.data).item() if isinstance(bound, tl.tensor) else bound)


def short_range(first: Any, end: Any = None, step: Any = 1, **_: Any) -> Iterator[Any]:
    """In place of ``tl.range``: a long loop has three steps. Its index has the type that a GPU gives it."""
    first, end = (0, first) if end is None else (first, end)
    bounds = first, end, step
    is_long = any(isinstance(bound, tl.tensor) and bound.dtype == tl.int64 for bound in bounds)
    kind, numbers = tl.int64 if is_long else tl.int32, range(*map(_number, bounds))
    chosen = numbers if len(numbers) <= 16 else [numbers[0], numbers[-2], numbers[-1]]
    for number in chosen:
        data = np.array([number], dtype=np.int64 if kind == tl.int64 else np.int32)
        yield tl.tensor(interpreter.TensorHandle(data, kind), kind)


def masked_load(builder: Any, ptrs: Any, mask: Any, other: Any, *_: Any, **__: Any) -> Any:
    element = ptrs.get_element_ty()
    kind = interpreter._get_np_dtype(element)
    if launch.check(ptrs.data, mask.data):
        fill = np.zeros_like(ptrs.data, dtype=kind) if other is None else other.data
        return interpreter.TensorHandle(
            interpreter._interpreter.load(ptrs.data, mask.data, fill, kind), element
        )
    return interpreter.TensorHandle(np.zeros(ptrs.data.shape, dtype=kind), element)


def masked_store(builder: Any, ptrs: Any, value: Any, mask: Any, *_: Any, **__: Any) -> None:
    if launch.check(ptrs.data, mask.data):
        interpreter._interpreter.store(ptrs.data, value.data, mask.data)


def prepare() -> None:
    fix_interpreter()
    patch_core = interpreter._patch_lang_core

    def patched(language: Any, scope: Any) -> None:
        patch_core(language, scope)
        scope.set_attr(language, "range", short_range)

    interpreter._patch_lang_core = patched
    interpreter.InterpretedFunction.run = run_last_program
    interpreter.InterpreterBuilder.create_masked_load = masked_load
    interpreter.InterpreterBuilder.create_masked_store = masked_store


def absent(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def run(output: Tensor | tuple[Tensor, ...]) -> None:
    output = output[0] if isinstance(output, tuple) else output
    output.backward(torch.empty_like(output))


def launch_all() -> None:
    """The widest layers of released models."""
    run(swiglu(absent(TOKENS, 2 * 29568)))  # Qwen2.5-VL-72B
    run(swiglu(absent(8 * TOKENS, 2 * 768), absent(8 * TOKENS, dtype=torch.float32)))
    swiglu_in_fp8(absent(TOKENS, 2 * 29568), torch.ones(1), torch.zeros(1), absent(TOKENS, 29568))
    run(residual_norm(absent(TOKENS, 8192), absent(8192), None, 1e-6, added=absent(TOKENS, 8192)))
    run(residual_norm(absent(PATCHES, 1280), absent(1280), absent(1280), 1e-6, is_quantized=True))
    quantize_rows(absent(PATCHES, 1280))
    column_sums_and_rows(absent(PATCHES, 3840))
    run(biased_sum(absent(PATCHES, 1280), absent(PATCHES, 1280), absent(1280)))
    run(biased_activation(absent(PATCHES, 4304), absent(4304), "gelu_tanh", is_gated=False))
    gated = {"is_gated": True, "is_quantized": True}
    run(biased_activation(absent(PATCHES, 2 * 3420), absent(2 * 3420), "silu", **gated))

    # The tower.
    bounds = torch.tensor([0, PATCHES - 100, PATCHES], dtype=torch.int32)
    angles = absent(PATCHES, 40, dtype=torch.float32, grad=False)
    run(tower_attention(absent(PATCHES, 16 * 3 * 80), angles, angles, bounds, 80))
    windows = torch.tensor([0, *range(PATCHES % 64, PATCHES + 1, 64)][-3:], dtype=torch.int32)
    run(window_attention(absent(PATCHES, 16 * 3 * 80), angles, angles, windows, 64, 80))

    # Linear attention, of 397B-A17B.
    segments = torch.zeros(TOKENS, dtype=torch.int32)
    run(causal_conv_triton.causal_conv(absent(TOKENS, 12288), absent(12288, 4), segments))
    run(gated_norm_triton.gated_norm(absent(TOKENS, 64, 128), absent(TOKENS, 64, 128), absent(128), 1e-6))
    query, key, value = absent(TOKENS, 16 + 16 + 64, 128).split((16, 16, 64), dim=1)
    decay, beta = absent(TOKENS, 64, dtype=torch.float32), absent(TOKENS, 64)
    run(gated_delta_rule(query, key, value, decay, beta, segments))
    # The same as the shard of a longer row, amid a document.
    state = absent(64, 128, 128, dtype=torch.float32, grad=False)
    route = SimpleNamespace(tokens_before=1, tokens_after=1, is_spanned=True, last_start=0, first_end=TOKENS)
    neighbours: Any = SimpleNamespace(
        route=route,
        halo=lambda x, width: absent(width, x.shape[1], grad=False),
        add_halo_gradients=lambda *_: None,
        initial_state=lambda *_: state,
        final_gradient=lambda *_: state,
    )
    run(causal_conv_triton.causal_conv(absent(TOKENS, 12288), absent(12288, 4), segments, neighbours))
    run(gated_delta_rule(query, key, value, decay, beta, segments, exchange=neighbours))

    # Experts: ten of each token, all on one rank.
    copies = 10 * TOKENS
    row_ids = torch.arange(copies, dtype=torch.int32).view(TOKENS, 10)
    with torch.no_grad():
        scatter_rows(absent(TOKENS, 4096, grad=False), row_ids, copies)
        sum_rows(absent(copies, 4096, grad=False), row_ids)
        scatter_parts(absent(TOKENS, 10 * 4096, grad=False), row_ids, copies)
        gather_parts(absent(copies, 4096, grad=False), row_ids)
        # The last tile is the second expert's.
        starts = torch.tensor([0, copies - 127, copies + 2], dtype=torch.int32)
        plan = TilePlan(starts, plan_tiles(starts.diff(), copies + 2).tile_table)
        addresses, rows = torch.tensor([WEIGHTS, WEIGHTS]), absent(copies + 2, 4096, grad=False)
        row_product(rows, addresses, plan, 2048, is_transposed=True)
        weight_product(rows, rows, addresses, plan, rows, accumulate=False)


@triton.jit
def _wrong_kernel(x, WIDTH: tl.constexpr):
    """Takes a product in 32 bits."""
    tl.store(x + tl.program_id(0) * WIDTH, 0.0)


def main() -> None:
    prepare()
    launch_all()
    assert not faults, faults
    print(json.dumps(largest_offsets))
    with np.errstate(over="ignore"):
        _wrong_kernel[TOKENS,](absent(TOKENS, 4096, grad=False), WIDTH=4096)
    assert faults, "a wrong kernel is not found"


if __name__ == "__main__":
    main()
