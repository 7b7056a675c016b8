"""Compares ways to give data-parallel ranks equal numbers of patches, on a mixed set.

    python benchmarks/balanced_batches.py --ranks 2 8 64 512

The set is drawn, because only sizes matter: 30 % text, 45 % single pictures, 15 % with 2 to 6 pictures, 10 %
videos (:func:`mixed`). Rows of ``--seq-len`` tokens are made without balance (each rank packs its own
samples), and as planned from sizes.

* ``max / mean``: patches of the fullest rank in a step over the mean of the ranks; the mean and the worst of
  the steps. Ranks wait for the fullest one.
* ``min / mean``: the same of the emptiest rank, whose GPU is idle meanwhile.
* ``fill``: tokens of the samples over those of the rows.
* ``ms``: processor time to plan a step and deal its rows, in the process of each rank that plans.
* ``step``: seconds of a step by the cost model of ``megatron-vl plan`` for the model on H200, with the
  tower's time on the fullest rank. ``tokens/s``: real tokens of a GPU in a second of it, and the gain over no
  balance.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_vl.config import DataConfig, TrainConfig
from megatron_vl.data.packing.fill_row import choose_row_samples
from megatron_vl.data.planned_rows import BatchPlanner
from megatron_vl.data.source.sample_order import SampleOrder
from megatron_vl.planning.calibration import shipped_calibration
from megatron_vl.planning.cost import StepCosts
from megatron_vl.planning.predict import predict_layout
from megatron_vl.planning.row_statistics import RowShape, RowStatistics
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import make_layout

BUFFER = 64
"""Samples among which a packer chooses (``data.packing_buffer``)."""
MERGED = 4
"""Patches of a token."""


@dataclass
class Mixed:
    """The sizes of the samples, and the patches of each one's pictures."""

    tokens: np.ndarray
    patches: np.ndarray
    pictures: list[list[int]]


def mixed(count: int, seq_len: int, seed: int = 0) -> Mixed:
    """Draws samples. Lengths of text and pictures are lognormal, as in many sets of conversations.

    Text alone: median 400 tokens. Pictures: median 500 tokens, 64 to 1,280. Videos: median 3,000 tokens.
    """
    chance = np.random.default_rng(seed)
    kinds = chance.choice(4, count, p=[0.3, 0.45, 0.15, 0.1])
    text = np.clip(chance.lognormal(np.log(400), 1.0, count), 20, 0.95 * seq_len).astype(int)
    found = Mixed(np.zeros(count, np.int64), np.zeros(count, np.int64), [])

    for sample, kind in enumerate(kinds.tolist()):
        number = (0, 1, int(chance.integers(2, 7)), 1)[kind]
        seen = np.clip(chance.lognormal(np.log(500), 0.6, number), 64, 1280)
        if kind == 3:
            seen = np.clip(chance.lognormal(np.log(3000), 0.5, 1), 500, seq_len - 700)
        written = text[sample] if kind == 0 else min(int(text[sample]) // 2 + 20, 600)
        while seen.sum() + written > seq_len:
            seen = seen[:-1]
        pictures = [int(tokens) * MERGED for tokens in seen]
        found.pictures.append(pictures)
        found.patches[sample] = sum(pictures)
        found.tokens[sample] = sum(pictures) // MERGED + written

    return found


Step = list[list[list[int]]]
"""The samples of each row of each rank."""


def own_rows(data: Mixed, ranks: int, share: int, seq_len: int) -> Iterator[Step]:
    """Each rank packs samples of its own, as a stream does."""
    chance = np.random.default_rng(1)
    buffers: list[list[int]] = [[] for _ in range(ranks)]
    sizes = list(zip(data.tokens.tolist(), data.patches.tolist(), strict=True))
    while True:
        step: Step = []
        for buffer in buffers:
            rows = []
            for _ in range(share):
                buffer += chance.integers(0, len(sizes), BUFFER - len(buffer)).tolist()
                chosen = choose_row_samples([sizes[sample] for sample in buffer], seq_len)
                rows.append([buffer[i] for i in chosen])
                taken = set(chosen)
                buffer[:] = [sample for i, sample in enumerate(buffer) if i not in taken]
            step.append(rows)
        yield step


def planned(data: Mixed, ranks: int, share: int, seq_len: int, seconds: list[float]) -> Iterator[Step]:
    """Rows planned from sizes."""
    order = SampleOrder([len(data.tokens)], [1.0], 1, is_shuffled=True)
    planner = BatchPlanner(
        order,
        lambda _, at: (data.tokens[at], data.patches[at]),
        ranks * share,
        seq_len,
        0,
        least_ahead=BUFFER,
    )
    planner.next_batch()  # the first step draws more samples than later ones

    while True:
        start = time.process_time()
        batch = planner.next_batch().assign_to_ranks(ranks)
        seconds.append(time.process_time() - start)
        rows = [[place.index for place in row] for row in batch.rows_of_rank()]
        yield [rows[first : first + share] for first in range(0, len(rows), share)]


@dataclass
class Result:
    """The steps of one way."""

    spreads: list[float] = field(default_factory=list)
    """Patches of the fullest rank over the mean."""
    least: list[float] = field(default_factory=list)
    """Patches of the emptiest rank over the mean."""
    fills: list[float] = field(default_factory=list)


def measured(data: Mixed, steps: Iterator[Step], count: int, seq_len: int) -> Result:
    found = Result()
    for _ in range(count):
        step = next(steps)
        loads = [sum(int(data.patches[row].sum()) for row in rows) for rows in step]
        found.spreads.append(max(loads) / statistics.mean(loads))
        found.least.append(min(loads) / statistics.mean(loads))
        rows = [row for own in step for row in own]
        found.fills.append(statistics.mean(int(data.tokens[row].sum()) / seq_len for row in rows))
    return found


def shape(data: Mixed, row: list[int]) -> RowShape:
    """What the cost model needs of a row; windows have 64 patches."""
    frames = [patches for sample in row for patches in data.pictures[sample]]
    windows = [min(64, patches - at) for patches in frames for at in range(0, patches, 64)]
    lengths = [int(data.tokens[sample]) for sample in row]
    loss = int(sum(lengths) - sum(frames) // MERGED) // 2
    return RowShape(tuple(lengths), tuple(frames), tuple(windows), loss, len(frames))


def step_seconds(
    spec: ModelSpec, rows: RowStatistics, ranks: int, share: int, seq_len: int, spread: float
) -> float:
    """Seconds of a step in which the tower of the fullest rank has ``spread`` times the mean of patches."""
    data = DataConfig(seq_len=seq_len)
    config = TrainConfig(global_batch_size=ranks * share, data=data)
    layout = make_layout(spec, 1, 1, 1, None)
    even = predict_layout(config, spec, ranks, layout, row_statistics=rows).step_seconds
    tower = StepCosts(
        config, spec, layout, ranks, rows, shipped_calibration()
    ).vision_tower_time.total_seconds
    return even + (spread - 1) * share * tower


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 512])
    parser.add_argument("--share", type=int, default=4, help="rows of a rank in a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=100_000)
    config = Path(__file__).parents[1] / "tests/hf_configs/Qwen2.5-VL-7B-Instruct.json"
    parser.add_argument("--config", type=Path, default=config, help="config.json of the model")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(args.config.read_bytes())
        spec = read_spec(folder)
    data = mixed(args.samples, args.seq_len)
    print(
        f"{args.samples} samples of {data.tokens.mean():.0f} tokens, {data.tokens.max()} at most;"
        f" {100 * data.patches.sum() / MERGED / data.tokens.sum():.0f} % of them of pictures"
    )
    some = [row for rank in next(own_rows(data, 64, args.share, args.seq_len)) for row in rank]
    rows = RowStatistics("drawn", tuple(shape(data, row) for row in some))
    print("ranks  way         max / mean (worst)  min / mean (worst)  fill      ms  step  tokens/s of a GPU")
    for ranks in args.ranks:
        seconds: list[float] = []
        ways = {
            "no balance": own_rows(data, ranks, args.share, args.seq_len),
            "planned": planned(data, ranks, args.share, args.seq_len, seconds),
        }
        before = 0.0
        for way, steps in ways.items():
            found = measured(data, steps, args.steps, args.seq_len)
            spread, fill = statistics.mean(found.spreads), statistics.mean(found.fills)
            least = f"{statistics.mean(found.least):.3f} ({min(found.least):.3f})"
            step = step_seconds(spec, rows, ranks, args.share, args.seq_len, spread)
            speed = fill * args.share * args.seq_len / step
            before = before or speed
            most = f"{spread:.3f} ({max(found.spreads):.3f})"
            cost = f"{1000 * statistics.mean(seconds):6.0f}" if way == "planned" else "      "
            print(
                f"{ranks:5}  {way:10}  {most:>18}  {least:>18}  {fill:.4f} {cost}"
                f"  {step:.3f}  {speed:,.0f} ({100 * (speed / before - 1):+.1f} %)",
                flush=True,
            )


if __name__ == "__main__":
    main()
