"""The program of each process of a generation.

    torchrun --nproc-per-node 4 -m toolkit.generate.worker JOB.json OUT.json

``JOB.json`` holds the fields of :class:`GenerateJob`; ``OUT.json`` gets the list of new tokens of each
prompt.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vl.config import ModelConfig, ParallelConfig, TrainConfig, VideoPositions
from megatron_vl.data.packing.assemble import Sample, pack_row
from megatron_vl.parallel.grid import ProcessGrid, end_distributed, init_distributed, make_grid
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import make_layout
from megatron_vl.training.generate import Prompt, generate
from megatron_vl.training.model import build_model
from megatron_vl.weights.reader import WeightReader
from toolkit.samples import read_samples

ROW_UNIT = 64
"""Rows of prompts are padded to a multiple of this many tokens."""


@dataclass
class GenerateJob:
    """What to generate, and in which layout."""

    hf: str
    checkpoint: str
    samples: str
    """File of prompts written by :func:`toolkit.samples.write_samples`."""
    layout: dict[str, Any]
    """Arguments of :func:`megatron_vl.spec.layout.make_layout`."""
    max_new_tokens: int
    stop: list[int]
    dtype: str = "float32"
    platform: str = "cpu"
    batch: int = 8
    """Prompts that are answered together."""
    video_positions: VideoPositions = "released"
    """Like ``data.video_positions`` of a run."""


def main(argv: list[str]) -> int:
    job = GenerateJob(**json.loads(Path(argv[0]).read_text()))
    answers = answer(job, read_samples(Path(job.samples)))
    if dist.get_rank() == 0:
        Path(argv[1]).write_text(json.dumps(answers))
    end_distributed()
    return 0


def answer(job: GenerateJob, samples: list[Sample]) -> list[list[int]]:
    """Generates the new tokens of each prompt. Collective over all ranks."""
    platform = get_platform(job.platform)
    spec = read_spec(job.hf)
    layout = make_layout(spec, **job.layout)
    init_distributed(platform)
    grid = make_grid(layout)
    # The fused GPU kernels do not support float32.
    attention: Any = "sdpa" if job.dtype == "float32" else "auto"
    config = TrainConfig(
        model=ModelConfig(hf=job.hf, vision_attention=attention, language_attention=attention),
        # In a model with experts, each rank routes its own tokens.
        parallel=ParallelConfig(
            **job.layout, sequence_parallel=layout.tp > 1 and spec.language.moe is not None
        ),
        dtype=job.dtype,  # type: ignore[arg-type]
    )

    weights = WeightReader(job.checkpoint)
    chunks = build_model(config, spec, layout, platform, grid, weights=weights).chunks
    answers: list[list[int]] = []
    for start in range(0, len(samples), job.batch):
        given = samples[start : start + job.batch]
        # If experts are spread over more ranks than a replica has, every replica answers an equal number
        # of prompts.
        shared = given + given[-1:] * (-len(given) % grid.dp)
        share = shared[grid.dp_rank :: grid.dp]
        prompts = prepare(share, spec, job.video_positions) if grid.owns_loader else None
        mine = generate(
            chunks, grid, platform, prompts, max_new_tokens=job.max_new_tokens, stop=frozenset(job.stop)
        )
        answers += _all_answers(mine, grid)[: len(given)]

    return answers


def _all_answers(mine: list[list[int]], grid: ProcessGrid) -> list[list[int]]:
    """The answers of all replicas, in the order of the prompts. Collective over all ranks."""
    if grid.dp == 1:
        return mine
    said: list[Any] = [None] * grid.world_size
    dist.all_gather_object(said, (grid.dp_rank, mine))
    shares = [share for _, share in sorted({replica: share for replica, share in said}.items())]
    return [answer for row in zip(*shares, strict=True) for answer in row]


def prepare(
    samples: list[Sample], spec: ModelSpec, video_positions: VideoPositions = "released"
) -> list[Prompt]:
    """Converts prompts into rows of one length."""
    length = ROW_UNIT * math.ceil(max(map(len, samples)) / ROW_UNIT)
    rows = [pack_row([sample], spec, length, video_positions=video_positions) for sample in samples]
    return [Prompt(row, len(sample)) for row, sample in zip(rows, samples, strict=True)]


def write_job(job: GenerateJob, path: Path) -> None:
    path.write_text(json.dumps(dataclasses.asdict(job)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
