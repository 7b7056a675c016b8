"""Checks the losses by source of a row on a GPU: equal to those on the CPU, and without a wait of the host.

python -m tests.gpu.source_losses
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch

from megatron_vl.training.step import _loss_by_source, token_loss


def row(device: str) -> Any:
    """A row of 4,096 tokens: samples of 1 to 120 tokens from 200 sources, and a padded tail."""
    lengths = [1 + (7 * i) % 120 for i in range(60)]
    bounds = torch.tensor([0, *lengths, 4096 - sum(lengths)]).cumsum(0).int()
    mask = (torch.arange(4096) % 3 == 0).float() * (1 + torch.arange(4096) % 5)
    sources = torch.tensor([*((11 * i) % 200 for i in range(60)), -1], dtype=torch.int32)
    return SimpleNamespace(
        loss_mask=mask.to(device),
        sources=sources.to(device),
        local_segments=SimpleNamespace(cu_seqlens=bounds.to(device)),
    )


def by_source(device: str, losses: torch.Tensor) -> torch.Tensor:
    given, here = row(device), losses.to(device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    reports = [token_loss(given, here)[2] for _ in range(4)]
    found = _loss_by_source(reports, 200)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    return found.cpu()


def main() -> int:
    losses = torch.rand(1, 4096, generator=torch.Generator().manual_seed(0))
    wanted = by_source("cpu", losses)
    found = [by_source("cuda", losses) for _ in range(3)]
    right = all(torch.allclose(wanted, one, rtol=1e-12) for one in found)
    same = all(torch.equal(found[0], one) for one in found)
    print(f"{'ok' if right else 'FAILED'} losses by source equal those on the CPU")
    print(f"{'ok' if same else 'FAILED'} their bits are the same each time")
    return 0 if right and same else 1


if __name__ == "__main__":
    sys.exit(main())
