"""The start of the ranks of a run: they join each other, and may be asked to stop before the first step."""

import math
import signal

import torch
import torch.distributed as dist

from megatron_vl.config import TrainConfig
from megatron_vl.parallel import failures
from megatron_vl.parallel.heartbeat import slow_start_timeout_s
from megatron_vl.parallel.joining import join_limit_s, stop_early
from megatron_vl.parallel.process_grid import init_distributed
from megatron_vl.platform import Platform, get_platform
from megatron_vl.system.signals import requested_stop_signal


def join_ranks(config: TrainConfig) -> Platform:
    """Joins the process group of all ranks, and watches them from now on. Collective."""
    timeout_s = config.failures.timeout_s

    # Collectives wait longer than `failures.timeout_s`, whose message says more.
    timeout_minutes = max(30, math.ceil(slow_start_timeout_s(timeout_s) / 60) + 10) if timeout_s else 30

    platform = get_platform(config.platform)
    init_distributed(platform, timeout_minutes, join_limit_s(timeout_s))
    failures.watch_ranks(timeout_s)
    return platform


def exit_if_stop_requested(platform: Platform) -> None:
    """Ends all ranks if a signal asked any of them to stop before the first step. Collective.

    Raises:
        SystemExit: on all ranks, with 128 + the number of the signal.
    """
    signal_name = requested_stop_signal()
    signal_tensor = torch.tensor(
        signal.Signals[signal_name].value if signal_name else 0, device=platform.device
    )
    dist.all_reduce(signal_tensor, op=dist.ReduceOp.MAX)  # a signal may have reached one rank alone
    if signal_number := int(signal_tensor):
        failures.stop_watching()
        stop_early(signal_number)
