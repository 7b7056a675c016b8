"""Runs the parity worker and compares, case by case, the order in which ranks enter collectives.

    python -m tests.parity.collective_orders CASES.json OUT.json FOLDER_OF_REFERENCES

Two ranks must enter the collectives of all groups that both belong to in one order. On GPUs, each group has a
stream of its own: ranks that start two collectives in different orders can wait for each other, even if each
group by itself sees the same sequence. Messages between two ranks (send, receive) are not compared.
"""

import itertools
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.platform import Platform
from toolkit.parity import reference_job, worker

from .training import TableCase, run_training

COLLECTIVES = """
allreduce allreduce_coalesced allgather _allgather_base allgather_coalesced allgather_into_tensor_coalesced
reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced alltoall alltoall_base broadcast barrier
gather scatter reduce
""".split()
"""Methods of a process group, through which all functions of ``torch.distributed`` go."""
UNEVEN = ("alltoall", "alltoall_base")
"""Collectives in which each rank may send another number of elements."""

Entry = tuple[str, tuple[int, ...], str, int]
"""A group's name, its ranks, the collective, and the number of elements."""


class CollectiveLog:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        for name in COLLECTIVES:
            setattr(dist.ProcessGroup, name, self._recorded(name, getattr(dist.ProcessGroup, name)))

    def _recorded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def enter(group: Any, *args: Any, **kwargs: Any) -> Any:
            if group.size() > 1:
                ranks = tuple(dist.get_process_group_ranks(group))
                elements = 0 if name in UNEVEN else _num_elements(args[:2])
                self.entries.append((group.group_name, ranks, name, elements))
            return original(group, *args, **kwargs)

        return enter

    def take(self) -> list[Entry]:
        entries, self.entries = self.entries, []
        return entries


def _num_elements(arguments: Any) -> int:
    if isinstance(arguments, torch.Tensor):
        return arguments.numel()
    return sum(map(_num_elements, arguments)) if isinstance(arguments, list | tuple) else 0


def first_difference(entries_by_rank: list[list[Entry]]) -> str:
    """Describes where two ranks enter different collectives of their common groups; empty if nowhere."""
    for pair in itertools.combinations(range(len(entries_by_rank)), 2):
        first, second = pair
        common = [[entry for entry in entries_by_rank[rank] if {*pair} <= {*entry[1]}] for rank in pair]
        for number, (ours, theirs) in enumerate(itertools.zip_longest(*common)):
            if ours != theirs:
                entered = f"rank {first} enters {ours}, rank {second} {theirs}"
                return f"collective {number}: {entered}, after {common[0][max(0, number - 2) : number]}"
    return ""


def main(argv: list[str]) -> int:
    """Runs the parity worker; the result of each case has its first difference of orders."""
    log = CollectiveLog()
    run_case = worker.run_case

    def run_and_compare(case: TableCase, platform: Platform) -> dict[str, Any]:
        log.take()
        result = run_training(case, platform) if case.train else run_case(case, platform)
        entries_by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(entries_by_rank, log.take())
        return result | {"collectives": len(entries_by_rank[0]), "order": first_difference(entries_by_rank)}

    references = Path(argv[2])
    references.mkdir(exist_ok=True)
    reference_job._references_root = lambda: references
    worker.run_case, worker.ParityCase = run_and_compare, TableCase
    return worker.main(argv[:2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
