"""Inputs of recomputed layers in host memory on a GPU: what comes back is what left, to the bit.

    python -m tests.gpu.layer_inputs

The sums of the bits of all inputs are taken where they leave and where they come back, over several rows in
flight, beside layers that overwrite free memory. Nothing waits for the GPU in between. Exit code 1 when a sum
differs, or when the device kept more than two inputs of a row.
"""

import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vl.platform import Platform, get_platform
from megatron_vl.training.offload.layer_inputs import PIECE_BYTES, LayerInputOffload

TOKENS, WIDTH, LAYERS, ROWS, STEPS = 32_768, 4096, 12, 3, 3
INPUT_BYTES = 2 * TOKENS * WIDTH


class KeptInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, sums: list[list[Tensor]]) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.weight, ctx.sums = weight, sums
        ctx.number = len(sums)
        sums.append([bit_sum(hidden)])
        return busy_layer(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        busy_layer(hidden, ctx.weight)
        ctx.sums[ctx.number].append(bit_sum(hidden))
        return gradient, None, None


class Block(nn.Module):
    """What :class:`LayerInputOffload` needs of a transformer block."""

    def __init__(self, device: torch.device, pre_process: bool) -> None:
        super().__init__()
        self.pre_process = pre_process
        self.layers = range(LAYERS)
        self.weight = torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) / WIDTH**0.5

    def forward(self, hidden: Tensor, sums: list[list[Tensor]]) -> Tensor:
        for _ in self.layers:
            hidden = KeptInput.apply(hidden, self.weight, sums)
        return hidden


def busy_layer(hidden: Tensor, weight: Tensor) -> Tensor:
    """Several products, whose memory was free before and is free again after."""
    for _ in range(4):
        hidden = hidden @ weight
        torch.full_like(hidden, torch.nan)
    return hidden


def bit_sum(hidden: Tensor) -> Tensor:
    return hidden.view(torch.int16).sum(dtype=torch.int64)


def run_steps(block: Block, device: torch.device) -> tuple[int, float, float]:
    """Returns (sums that differ, seconds of a step, most inputs on the device at once) of several steps."""
    all_sums: list[list[Tensor]] = []
    for step in range(1 + STEPS):
        if step == 1:  # the first step allocates host memory
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
        in_flight: list[Tensor] = []
        for _ in range(ROWS):
            embedded = torch.randn(TOKENS, 1, WIDTH, device=device, dtype=torch.bfloat16)
            in_flight.append(block(embedded.requires_grad_(), all_sums))
            del embedded
            if len(in_flight) == 2:
                in_flight.pop(0).sum().backward()
        in_flight.pop().sum().backward()

    torch.cuda.synchronize()
    step_seconds = (time.perf_counter() - start) / STEPS
    different = sum(not torch.equal(*pair) for pair in all_sums)
    return different, step_seconds, torch.cuda.max_memory_allocated() / INPUT_BYTES


def compare(platform: Platform, pre_process: bool) -> bool:
    """Whether bits or memory are wrong. Without ``pre_process``, as in later stages, its input stays."""
    block = Block(platform.device, pre_process)
    without = run_steps(block, platform.device)
    offload = LayerInputOffload(platform)
    offload.follow(block)  # type: ignore[arg-type]
    found = run_steps(block, platform.device)
    for name, (different, seconds, inputs) in {"on the device": without, "on the host": found}.items():
        figures_text = f"{1e3 * seconds:.1f} ms a step, peak of {inputs:.1f} inputs"
        print(f"first block {pre_process}, inputs {name}: {different} differ, {figures_text}")

    num_moved = LAYERS - (not pre_process)
    expected_pieces = 2 * num_moved * -(-INPUT_BYTES // PIECE_BYTES)
    print(f"host memory: {offload.num_pieces} pieces, {expected_pieces} needed for two rows")
    # Two rows were in flight: all but two inputs of each have left.
    has_left = found[2] <= without[2] - 2 * (num_moved - 2) + 1
    return bool(found[0]) or offload.num_pieces > expected_pieces or not has_left


if __name__ == "__main__":
    cuda = get_platform("cuda")
    sys.exit(any([compare(cuda, pre_process) for pre_process in (True, False)]))
