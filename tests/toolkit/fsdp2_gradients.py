"""Compares ``benchmarks.fsdp2`` with the plain Hugging Face model on the same samples, one by one.

torchrun --nproc-per-node 2 -m tests.toolkit.fsdp2_gradients OUT.json HF_FOLDER ...
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForImageTextToText

from benchmarks.fsdp2 import Trainer, build, hf_config, hf_row, read_options
from megatron_vl.config import DataConfig
from megatron_vl.data.sample.pixel_settings import PixelNorm
from megatron_vl.data.synthetic import draw_rows
from toolkit.parity.reference import backward_mean_loss

SEQ_LEN, ROWS = 700, 2


def compare(hf: str, seed: int) -> dict[str, float]:
    """Relative errors of the loss and of each gradient (the largest), on every rank."""
    options, given = read_options(["--model.hf", hf, "--gradient-sync", ("every", "last")[seed % 2]])
    spec = options.spec

    def drawn(rank: int):
        data = DataConfig(path="synthetic:images", seq_len=SEQ_LEN, seed=seed + rank)
        return list(itertools.islice(draw_rows(data, spec), ROWS))

    model = build(hf_config(options), torch.device("cpu"))
    trainer = Trainer(options, model, torch.device("cpu"), given.gradient_sync == "every")
    loss = float(trainer.backward([hf_row(samples, spec, SEQ_LEN) for samples in drawn(dist.get_rank())]))
    reference = AutoModelForImageTextToText.from_config(
        hf_config(options), dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    buffers = dict(model.named_buffers())

    for name, buffer in reference.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    named = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    reference.load_state_dict(named)
    samples = [sample for rank in range(dist.get_world_size()) for row in drawn(rank) for sample in row]
    expected = backward_mean_loss(reference, samples, spec, PixelNorm(mean=(0.5,) * 3, std=(0.5,) * 3))
    errors = {
        name: float((gradients[name] - p.grad).norm() / p.grad.norm())
        for name, p in reference.named_parameters()
        if p.grad is not None and float(p.grad.norm()) > 1e-7
    }

    return {
        "loss_error": abs(loss - expected) / expected,
        "gradients": len(errors),
        "gradient_error": max(errors.values()),
    }


def main() -> int:
    dist.init_process_group("gloo")
    out, *folders = sys.argv[1:]
    results = {Path(hf).name: compare(hf, seed) for seed, hf in enumerate(folders)}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
