"""The numbers that ranks count between two printed lines, and their reduction over all ranks.

What is sent, reduced and read back follows from the fields of :class:`StepMetrics`, so a new number takes one
more line there. The size of the message does not depend on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

_LARGEST = ("data_wait_s", "memory_gib")
"""The fields that are reduced to their maximum; all others are summed."""


@dataclass
class StepMetrics:
    """One rank's numbers since the last printed line.

    Only ranks that own a loader count rows. The others leave these fields at 0. Integers are reduced as
    float64, so they are exact up to 2^53.
    """

    language_flops: float = 0.0
    vision_flops: float = 0.0
    num_real_tokens: int = 0
    """Tokens of samples, without the padded tails of rows."""
    samples: int = 0
    images: int = 0
    patches: int = 0
    dropped_samples: int = 0
    """Samples that could not be used."""
    sending_ranks: int = 0
    """Ranks that also send a message (see :mod:`megatron_vl.training.report.gather`)."""
    data_wait_s: float = 0.0
    memory_gib: float = 0.0

    def reduce_over_ranks(self, device: torch.device) -> StepMetrics:
        """The numbers reduced over all ranks, equal on each. Collective."""
        summed = [field.name for field in fields(self) if field.name not in _LARGEST]
        numbers: dict[str, float] = {}
        for names, reduce_op in ((summed, dist.ReduceOp.SUM), (_LARGEST, dist.ReduceOp.MAX)):
            local_values = [float(getattr(self, name)) for name in names]
            values = torch.tensor(local_values, dtype=torch.float64, device=device)
            dist.all_reduce(values, op=reduce_op)
            numbers |= dict(zip(names, values.tolist(), strict=True))
        default = StepMetrics()  # whose numbers have the types of the fields
        return StepMetrics(**{name: type(getattr(default, name))(number) for name, number in numbers.items()})
