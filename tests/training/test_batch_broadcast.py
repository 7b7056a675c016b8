"""A row arrives as it was on its owner, whatever buffers it travelled in."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vl.platform import get_platform
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import UNSHARDED
from megatron_vl.training.rows.batch_broadcast import BatchBroadcast, ReplicaLoaderError
from tests.support.ranks import in_ranks


@in_ranks()
def test_loader_that_ends_or_fails_is_named_by_its_replica() -> None:
    def broken() -> Iterator[Any]:
        raise OSError("train-000007.tar: Input/output error")
        yield

    grid: Any = SimpleNamespace(owns_loader=True, dp=1, dp_rank=3, replica_ranks=1, cp=1, sharding=UNSHARDED)
    grid.from_loader_owner = lambda value: value
    spec = read_spec("tests/hf_configs/Qwen2.5-VL-7B-Instruct.json")
    prefix = "data-parallel rank 3: the loader failed: "
    for loader, message in (
        (iter(()), "the data set ended; training needs a repeating loader"),
        (broken(), "OSError: train-000007.tar: Input/output error"),
    ):
        with pytest.raises(ReplicaLoaderError, match=f"^{prefix}{message}$"):
            BatchBroadcast(grid, get_platform("cpu"), loader, 2, spec=spec).next_batch()
