"""The numbers that ranks count between two printed lines, and their reduction over all ranks.

Each field of :class:`StepMetrics` names a number and says how it is reduced. What is sent, reduced and read
back follows from the fields, so a new number takes one more line there. The size of the message does not
depend on the number of ranks, and the device is read once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist


def _summed_field(default: float | int) -> Any:
    return field(default=default, metadata={"op": dist.ReduceOp.SUM})


def _largest_field() -> Any:
    return field(default=0.0, metadata={"op": dist.ReduceOp.MAX})


@dataclass
class StepMetrics:
    """One rank's numbers since the last printed line.

    Only ranks that own a loader count rows. The others leave these fields at 0. Integers are reduced as
    float64, so they are exact up to 2^53.
    """

    language_flops: float = _summed_field(0.0)
    vision_flops: float = _summed_field(0.0)
    num_real_tokens: int = _summed_field(0)
    """Tokens of samples, without the padded tails of rows."""
    samples: int = _summed_field(0)
    images: int = _summed_field(0)
    patches: int = _summed_field(0)
    dropped_samples: int = _summed_field(0)
    """Samples that could not be used."""
    sending_ranks: int = _summed_field(0)
    """Ranks that also send a message (see :mod:`megatron_vl.training.rank_0_gather`)."""
    data_wait_s: float = _largest_field()
    memory_gib: float = _largest_field()

    def reduce_over_ranks(self, device: torch.device) -> StepMetrics:
        """The numbers reduced over all ranks, equal on each. Collective.

        There are two small reductions and one read from the device.
        """
        names_by_op: dict[Any, list[str]] = {}
        for metric_field in fields(self):
            reduce_op = metric_field.metadata["op"]
            names_by_op.setdefault(reduce_op, []).append(metric_field.name)

        # Both reductions are in flight at once.
        ordered_names: list[str] = []
        reduced_tensors = []
        pending_reductions = []
        for reduce_op, field_names in names_by_op.items():
            local_values = [float(getattr(self, name)) for name in field_names]
            local_tensor = torch.tensor(local_values, dtype=torch.float64, device=device)
            ordered_names += field_names
            reduced_tensors.append(local_tensor)
            pending_reductions.append(dist.all_reduce(local_tensor, op=reduce_op, async_op=True))
        for pending_reduction in pending_reductions:
            pending_reduction.wait()

        reduced_numbers = torch.cat(reduced_tensors).tolist()
        reduced_metrics = StepMetrics()
        for name, number in zip(ordered_names, reduced_numbers, strict=True):
            default_number = getattr(reduced_metrics, name)
            if isinstance(default_number, int):
                number = int(number)
            setattr(reduced_metrics, name, number)
        return reduced_metrics
