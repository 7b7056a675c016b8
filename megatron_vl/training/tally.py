"""The numbers that ranks count between two printed lines, and their reduction over all ranks.

Each field of :class:`Tally` names a number and says how it is reduced. What is sent, reduced and read back
follows from the fields, so a new number takes one more line there. The size of the message does not depend on
the number of ranks, and the device is read once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist


def _sum(default: float | int) -> Any:
    return field(default=default, metadata={"op": dist.ReduceOp.SUM})


def _largest(default: float | int) -> Any:
    return field(default=default, metadata={"op": dist.ReduceOp.MAX})


@dataclass
class Tally:
    """One rank's numbers since the last printed line.

    Only ranks that own a loader count rows; the others leave those fields at 0.

    Integers are exact up to 2^53, as they travel as float64.
    """

    language_flops: float = _sum(0.0)
    vision_flops: float = _sum(0.0)
    tokens: int = _sum(0)
    """Tokens of samples, without the padded tails of rows."""
    samples: int = _sum(0)
    images: int = _sum(0)
    patches: int = _sum(0)
    dropped: int = _sum(0)
    """Samples that could not be used."""
    senders: int = _sum(0)
    """Ranks that also send a message (see :mod:`megatron_vl.training.mailbox`)."""
    data_wait_s: float = _largest(0.0)
    memory_gib: float = _largest(0.0)

    def reduced(self, device: torch.device) -> Tally:
        """The numbers reduced over all ranks, equal on each. Collective.

        It takes two small reductions and one read from the device.
        """
        names: dict[Any, list[str]] = {}
        for entry in fields(self):
            names.setdefault(entry.metadata["op"], []).append(entry.name)

        reduced, works = {}, []
        for op, group in names.items():
            values = [float(getattr(self, name)) for name in group]
            reduced[op] = torch.tensor(values, dtype=torch.float64, device=device)
            works.append(dist.all_reduce(reduced[op], op=op, async_op=True))
        for work in works:
            work.wait()

        order = [name for group in names.values() for name in group]
        found = dict(zip(order, torch.cat(list(reduced.values())).tolist(), strict=True))
        whole = {entry.name for entry in fields(self) if isinstance(entry.default, int)}
        return Tally(**{name: int(value) if name in whole else value for name, value in found.items()})
