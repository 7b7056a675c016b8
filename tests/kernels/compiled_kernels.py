"""Compiles the Triton kernels that multiply matrices, without a GPU: for Hopper, or a compute capability.

    python -m tests.kernels.compiled_kernels [89]

Every launch is compiled instead of run. The output is JSON: for each kernel and its tile, the numbers of
ptxas's warnings about performance on Hopper. C7510 to C7515 say that matrix products wait for each other.
With a capability, it is the shared memory of a block in bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from megatron_vl.kernels.attention import tower_attention, window_attention
from megatron_vl.kernels.experts import grouped_gemm
from megatron_vl.kernels.linear_attention import delta_rule_forward, gated_delta_rule_triton
from megatron_vl.kernels.where_kernels_run import LARGE_SHARED_MEMORY

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes that a block of these compute capabilities may have (CUDA C++ Programming Guide, technical
specifications)."""
COMPILER_OPTIONS = ("num_warps", "num_stages")


def compile_launch(kernel: JITFunction, arguments: tuple, named: dict[str, Any], capability: int) -> Any:
    options = {name: named.pop(name) for name in COMPILER_OPTIONS if name in named}
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[index,] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        if isinstance(value, Tensor):
            attributes[index,] = [["tt.divisibility", 16]]

    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def warnings_of_ptxas(ptx: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(path), "-o", str(path) + ".cubin"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return re.findall(r"\((C75\d+)\)", output)


def launch_all(largest_window: int) -> None:
    """Launches every kernel with products, in the shapes of released models."""
    patches, cu_seqlens = 1024, torch.tensor([0, 500, 1024], dtype=torch.int32)
    for head_dim in (64, 72, 80):
        qkv = torch.zeros(patches, 16 * 3 * head_dim, dtype=torch.bfloat16, requires_grad=True)
        angles = torch.zeros(patches, head_dim // 2)
        tower_attention.tower_attention(qkv, angles, angles, cu_seqlens, head_dim).sum().backward()

    for longest_window in {64, min(100, largest_window)}:
        output = window_attention.window_attention(qkv, angles, angles, cu_seqlens, longest_window, head_dim)
        output.sum().backward()

    query, key = (torch.zeros(patches, 16, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    value = torch.zeros(patches, 32, 128, dtype=torch.bfloat16, requires_grad=True)
    log_decay, beta = torch.zeros(patches, 32), torch.zeros(patches, 32, dtype=torch.bfloat16)
    segment_ids = torch.zeros(patches, dtype=torch.int32)
    output = gated_delta_rule_triton.gated_delta_rule(query, key, value, log_decay, beta, segment_ids)
    output.sum().backward()

    rows, addresses = torch.zeros(512, 2048, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.int64)
    tile_plan = grouped_gemm.plan_tiles(torch.zeros(128, dtype=torch.int64), len(rows))
    for is_transposed in (False, True):
        grouped_gemm.row_product(rows, addresses, tile_plan, 1536, is_transposed=is_transposed)
        grouped_gemm.weight_product(rows, rows, addresses, tile_plan, log_decay, accumulate=is_transposed)


def main() -> None:
    launches: dict[str, Any] = {}
    capability = int(sys.argv[1]) if sys.argv[1:] else 90

    def compile_instead(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        shape = {name: value for name, value in named.items() if isinstance(value, int)}
        launches[f"{kernel.__name__} {shape}"] = compile_launch(kernel, arguments, named, capability)

    JITFunction.run = compile_instead
    is_large = SHARED_MEMORY[capability] >= LARGE_SHARED_MEMORY
    for module in (window_attention, delta_rule_forward):
        module.has_large_shared_memory = lambda device: is_large
    launch_all(128 if is_large else 64)

    if sys.argv[1:]:
        json.dump({name: launch.metadata.shared for name, launch in launches.items()}, sys.stdout)
        return
    texts = {name: launch.asm["ptx"] for name, launch in launches.items()}
    with_products = {name: warnings_of_ptxas(ptx) for name, ptx in texts.items() if "wgmma" in ptx}
    json.dump(with_products, sys.stdout)


if __name__ == "__main__":
    main()
