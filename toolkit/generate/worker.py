"""The program of each process of a generation.

    torchrun --nproc-per-node 4 -m toolkit.generate.worker JOB.json OUT.json

``JOB.json`` holds the fields of :class:`GenerateJob`. The list of new tokens of each prompt is written to
``OUT.json``.
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

from megatron_vl.config import LoraConfig, ModelConfig, ParallelConfig, TrainConfig, VideoPositions
from megatron_vl.data.packing.assemble_row import TokenizedSample, pack_row
from megatron_vl.parallel.process_grid import ProcessGrid, end_distributed, init_distributed, make_grid
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import make_layout
from megatron_vl.training.generate import PromptRow, generate_greedily
from megatron_vl.training.model import build_model
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.sample_encoder import read_samples

ROW_LENGTH_MULTIPLE = 64
"""Rows of prompts are padded to a multiple of this many tokens."""


@dataclass
class GenerateJob:
    """What to generate, and in which layout."""

    hf: str
    checkpoint: str
    samples: str
    """File of prompts written by :func:`toolkit.sample_encoder.write_samples`."""
    layout: dict[str, Any]
    """Arguments of :func:`megatron_vl.spec.layout.make_layout`."""
    max_new_tokens: int
    stop: list[int]
    dtype: str = "float32"
    platform: str = "cpu"
    batch: int = 8
    """Prompts that are answered together."""
    adapter: str = ""
    """Megatron weights of adapters; empty: none."""
    video_positions: VideoPositions = "released"
    """Like ``data.video_positions`` of a run."""


def main(argv: list[str]) -> int:
    generate_job = GenerateJob(**json.loads(Path(argv[0]).read_text()))
    answers = generate_answers(generate_job, read_samples(Path(generate_job.samples)))
    if dist.get_rank() == 0:
        Path(argv[1]).write_text(json.dumps(answers))
    end_distributed()
    return 0


def generate_answers(generate_job: GenerateJob, samples: list[TokenizedSample]) -> list[list[int]]:
    """Generates the new tokens of each prompt. Collective over all ranks."""
    platform = get_platform(generate_job.platform)
    spec = read_spec(generate_job.hf)
    layout = make_layout(spec, **generate_job.layout)
    init_distributed(platform)
    grid = make_grid(layout)
    # The fused GPU kernels do not support float32.
    attention_backend: Any = "sdpa" if generate_job.dtype == "float32" else "auto"
    adapter_reader = WeightReader(generate_job.adapter, takes_adapters=True) if generate_job.adapter else None
    config = TrainConfig(
        model=ModelConfig(
            hf=generate_job.hf, vision_attention=attention_backend, language_attention=attention_backend
        ),
        # In a model with experts, each rank routes its own tokens.
        parallel=ParallelConfig(
            **generate_job.layout, sequence_parallel=layout.tp > 1 and spec.language.moe is not None
        ),
        dtype=generate_job.dtype,  # type: ignore[arg-type]
        lora=dataclasses.replace(adapter_reader.lora, dropout=0.0) if adapter_reader else LoraConfig(),
    )

    weight_reader = WeightReader(generate_job.checkpoint)
    model_chunks = build_model(
        config, spec, layout, platform, grid, weight_reader=weight_reader, adapter_reader=adapter_reader
    ).model_chunks
    answers: list[list[int]] = []
    for batch_start in range(0, len(samples), generate_job.batch):
        batch_samples = samples[batch_start : batch_start + generate_job.batch]
        # If experts are spread over more ranks than a replica has, every replica answers an equal number
        # of prompts.
        padded_batch = batch_samples + batch_samples[-1:] * (-len(batch_samples) % grid.dp)
        replica_samples = padded_batch[grid.dp_rank :: grid.dp]
        packed_prompts = (
            pack_prompts(replica_samples, spec, generate_job.video_positions) if grid.owns_loader else None
        )
        replica_answers = generate_greedily(
            model_chunks,
            grid,
            platform,
            packed_prompts,
            max_new_tokens=generate_job.max_new_tokens,
            stop_token_ids=frozenset(generate_job.stop),
        )
        answers += _gather_answers(replica_answers, grid)[: len(batch_samples)]

    return answers


def _gather_answers(replica_answers: list[list[int]], grid: ProcessGrid) -> list[list[int]]:
    """The answers of all replicas, in the order of the prompts. Collective over all ranks."""
    if grid.dp == 1:
        return replica_answers
    answers_by_rank: list[Any] = [None] * grid.world_size
    dist.all_gather_object(answers_by_rank, (grid.dp_rank, replica_answers))

    # All ranks of a replica have its answers. Prompts were dealt to the replicas in turn.
    answers_by_replica = dict(answers_by_rank)
    dealt_answers = [answers_by_replica[dp_rank] for dp_rank in sorted(answers_by_replica)]
    ordered_answers: list[list[int]] = []
    for answers_in_turn in zip(*dealt_answers, strict=True):
        ordered_answers += answers_in_turn
    return ordered_answers


def pack_prompts(
    samples: list[TokenizedSample], spec: ModelSpec, video_positions: VideoPositions = "released"
) -> list[PromptRow]:
    """Converts prompts into rows of one length."""
    row_length = ROW_LENGTH_MULTIPLE * math.ceil(max(map(len, samples)) / ROW_LENGTH_MULTIPLE)
    prompt_rows = []
    for sample in samples:
        packed_row = pack_row([sample], spec, row_length, video_positions=video_positions)
        prompt_rows.append(PromptRow(packed_row, len(sample)))
    return prompt_rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
