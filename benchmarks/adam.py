"""Compares an update of weights with moments in bf16, in our kernel, with those of fp32 moments, on one GPU.

    python -m benchmarks.adam [--parameters 1e9] [--tensors 1 500]

Each line is an update of as many parameters, in tensors of one size: by Transformer Engine's FusedAdam and
torch's fused AdamW, with fp32 master weights (which the copies into bf16 weights come on top of), and by
ours, with bf16 weights and the master weights' lower halves. No gradient is 0: the root of 0 takes longer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from transformer_engine.pytorch.optimizers import FusedAdam

from benchmarks.timing import milliseconds
from megatron_vl.kernels.optimizer.adam import (
    AdamCoefficients,
    LaunchTables,
    ParameterSlice,
    StepCoefficients,
    adam_step,
)

OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def fused_adam(tensors: int, size: int) -> Callable[[], object]:
    return FusedAdam(parameters(tensors, size), **OPTIONS).step


def adamw(tensors: int, size: int) -> Callable[[], object]:
    return torch.optim.AdamW(parameters(tensors, size), fused=True, **OPTIONS).step


def parameters(tensors: int, size: int) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(0.02 * torch.randn(size, device="cuda")) for _ in range(tensors)]
    for weight in made:
        weight.grad = 1e-3 * torch.randn_like(weight)
    return made


def ours(tensors: int, size: int) -> Callable[[], object]:
    total = tensors * size
    weight = 0.02 * torch.randn(total, dtype=torch.bfloat16, device="cuda")
    avg, square = torch.zeros_like(weight), torch.zeros_like(weight)
    low, gradient = torch.zeros_like(weight, dtype=torch.int16), 1e-3 * torch.randn(total, device="cuda")
    stretches = [ParameterSlice(weight, gradient, i * size, size, i * size, 0) for i in range(tensors)]
    launch = LaunchTables()

    def step() -> None:
        rates = StepCoefficients({"all": AdamCoefficients.from_param_group(OPTIONS, 1)}, weight.device)
        adam_step(stretches, rates, avg, square, low, launch)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 500], help="numbers of tensors")
    args = parser.parse_args()

    for tensors in args.tensors:
        size = int(args.parameters) // tensors // 64 * 64
        billions = tensors * size / 1e9
        for make, nbytes in ((fused_adam, 28), (adamw, 28), (ours, 20)):
            taken = milliseconds(make(tensors, size), runs=10)
            each, speed = taken / billions, nbytes * billions / taken
            print(f"{tensors:5d} tensors  {make.__name__:10s} {each:7.2f} ms a billion  {speed:5.2f} TB/s")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
