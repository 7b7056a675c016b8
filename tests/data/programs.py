"""Functions that the tests of this folder run in separate processes (:func:`tests.support.ranks.call`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist

from megatron_vl.config import DataConfig, EvalConfig, TrainConfig
from megatron_vl.training import loop


def shared_facts(path: str) -> list[Any]:
    """For each rank: how often it read the description, the identity that it got, and its error for
    an empty split."""
    dist.init_process_group("gloo")
    reads: list[int] = []
    read = loop.read_data

    def counted(config: TrainConfig) -> Any:
        reads.append(1)
        return read(config)

    loop.read_data = counted
    config = TrainConfig(data=DataConfig(path=path))
    identity = loop.share_data(config)["train"].identity
    evaluated = dataclasses.replace(config, eval=EvalConfig(interval=1, split="test"))
    try:
        told = str(loop.share_data(evaluated))
    except ValueError as error:
        told = str(error)

    by_rank: list[Any] = [None, None]
    dist.all_gather_object(by_rank, [len(reads), identity, told])
    dist.destroy_process_group()
    return by_rank
