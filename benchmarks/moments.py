"""What Adam's moments in bf16 do: how far the second moment is off, and the loss curve of a small training.

    python -m benchmarks.moments bias [--elements 2000]
    python -m benchmarks.moments curve [--steps 300] [--beta2 0.95] [--dtype float32] [--seed 0]

``bias`` follows the second moment of gradients that are normally distributed with variance 1, until it no
longer depends on its start. It prints its mean, which should be 1, and what is left of it after as many steps
without gradient as take an exact one to 0.37.

``curve`` trains a tiny model on CPU, eight rows that it learns by heart, with moments in fp32, in bf16, in
bf16 in host memory (whose losses must be the same, or the exit code is 1), and in bf16 that are rounded to
the nearest, which the toolkit does not offer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.data.packing.assemble_row import pack_row
from megatron_vl.kernels import adam
from megatron_vl.kernels.moments import round_moments
from tests.support.tiny_trainer import ROWS, SEQ_LEN, tiny_trainer
from toolkit.parity.random_samples import make_sample
from toolkit.tiny_checkpoint import write_tiny_checkpoint

Rounding = Callable[[Tensor, Tensor, int, Tensor, Tensor], None]
BETAS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)


def to_nearest(exp_avg: Tensor, exp_avg_sq: Tensor, step: int, first: Tensor, second: Tensor) -> None:
    first.copy_(exp_avg)
    second.copy_(exp_avg_sq)


def second_moment(beta2: float, rounding: Rounding, elements: int) -> tuple[float, float]:
    """(mean after ten times the memory of ``beta2``, share that is left after once that without gradient)."""
    generator = torch.Generator().manual_seed(0)
    avg, square = torch.zeros(elements), torch.zeros(elements)
    kept = [torch.zeros(elements, dtype=torch.bfloat16) for _ in range(2)]
    memory = round(1 / (1 - beta2))
    means = []

    def update(gradient: Tensor, number: int) -> None:
        avg.copy_(kept[0]).lerp_(gradient, 0.1)
        square.copy_(kept[1]).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        rounding(avg, square, number, *kept)

    for number in range(1, 10 * memory + 1):
        update(torch.randn(elements, generator=generator), number)
        if number > 9 * memory:
            means.append(float(kept[1].float().mean()))
    before = float(kept[1].float().mean())
    for number in range(memory):
        update(torch.zeros(elements), 10 * memory + 1 + number)
    return sum(means) / len(means), float(kept[1].float().mean()) / before


def bias(args: argparse.Namespace) -> int:
    print("beta2   mean: nearest  stochastic   left without gradient: exact  nearest  stochastic")
    for beta2 in BETAS:
        near, left_near = second_moment(beta2, to_nearest, args.elements)
        ours, left = second_moment(beta2, round_moments, args.elements)
        exact = beta2 ** round(1 / (1 - beta2))
        print(f"{beta2:<7} {near:13.4f} {ours:11.4f} {exact:30.4f} {left_near:8.4f} {left:11.4f}")
    return 0


def losses(hf: Path, args: argparse.Namespace, rounding: Rounding, **options: Any) -> list[float]:
    """The loss of each step."""
    adam.round_moments = rounding  # type: ignore[attr-defined]
    torch.manual_seed(args.seed)
    trainer = tiny_trainer(hf, dtype=args.dtype, lr=args.lr, vision_lr=None, beta2=args.beta2, **options)
    samples = [make_sample(("image", "text")[n % 2], trainer.spec, args.seed + n) for n in range(8)]
    rows = itertools.cycle([pack_row([sample], trainer.spec, SEQ_LEN) for sample in samples])
    trainer.feed = trainer.feed_of(rows, ROWS)
    return [float(trainer.step(number).loss) for number in range(args.steps)]


def curve(args: argparse.Namespace) -> int:
    bf16 = {"moments_dtype": "bfloat16"}
    with tempfile.TemporaryDirectory(prefix="moments_") as folder:
        hf = Path(folder) / "hf"
        write_tiny_checkpoint(hf, "qwen2_5_vl")
        curves = {
            "float32": losses(hf, args, round_moments),
            "bfloat16": losses(hf, args, round_moments, **bf16),
            "bfloat16, offloaded": losses(hf, args, round_moments, offload_fraction=1.0, **bf16),
            "bfloat16, to the nearest": losses(hf, args, to_nearest, **bf16),
        }

    if args.out:
        args.out.write_text(json.dumps(curves))
    shown = range(0, args.steps, max(1, args.steps // 10))
    print("step".ljust(26), *(f"{number:8d}" for number in shown), "last tenth")

    for name, values in curves.items():
        last = values[-max(1, args.steps // 10) :]
        print(
            name.ljust(26), *(f"{values[number]:8.4f}" for number in shown), f"{sum(last) / len(last):9.5f}"
        )

    return int(curves["bfloat16"] != curves["bfloat16, offloaded"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["bias", "curve"])
    parser.add_argument("--elements", type=int, default=2000, help="numbers that are followed")
    parser.add_argument("--steps", type=int, default=300, help="steps of each training")
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the model")
    parser.add_argument("--seed", type=int, default=0, help="of weights and rows")
    parser.add_argument("--out", type=Path, help="file for all losses, JSON")
    args = parser.parse_args()
    return bias(args) if args.what == "bias" else curve(args)


if __name__ == "__main__":
    sys.exit(main())
