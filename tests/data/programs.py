"""Functions that the tests of this folder run in separate processes (:func:`tests.support.ranks.call`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist

from megatron_vl.config import DataConfig, EvalConfig, ModelConfig, TrainConfig
from megatron_vl.parallel.process_groups import broadcast_from_rank_0
from megatron_vl.training.resolve import read_split_facts


def shared_facts(path: str, hf: str) -> list[Any]:
    """For each rank: how often it read the description, the identity that it got, and its error for
    an empty split."""
    dist.init_process_group("gloo")
    reads: list[int] = []
    config = TrainConfig(model=ModelConfig(hf=hf), data=DataConfig(path=path))

    def read(config: TrainConfig) -> Any:
        reads.append(1)
        return read_split_facts(config)

    identity = broadcast_from_rank_0(lambda: read(config))["train"].dataset_identity
    evaluated = dataclasses.replace(config, eval=EvalConfig(interval=1, split="test"))
    try:
        message = str(broadcast_from_rank_0(lambda: read(evaluated)))
    except ValueError as error:
        message = str(error)

    by_rank: list[Any] = [None, None]
    dist.all_gather_object(by_rank, [len(reads), identity, message])
    dist.destroy_process_group()
    return by_rank
