"""``megatron-vl train``: starts the ranks of a run, acts as one of them, or prints its plan."""

from __future__ import annotations

import os
import sys

from megatron_vl.config import RunConfigError, TrainConfig, parse_config, validate
from megatron_vl.errors import UsageError
from megatron_vl.training.preflight import check_inputs
from toolkit.launch import free_port

from .environment import Surroundings, read
from .options import TrainOptions

FOR_GPUS = {
    # Overlapping communication with tensor parallelism requires a single work queue.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Sizes of pictures differ from row to row, which otherwise fragments the GPU's memory.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "OMP_NUM_THREADS": "1",
}
"""Environment variables of the ranks, unless the user has set them."""


def train(options: TrainOptions) -> int:
    """Returns the exit code of the training: 0 if done or stopped by a signal, 1 if stopped
    with a message."""
    surroundings = read(os.environ)
    if options.dry_run:
        from .dry_run import show

        nnodes = options.nnodes or surroundings.nnodes
        show(_config(options.fields), options.nproc_per_node, nnodes, options.json)
        return 0

    group = None if surroundings.is_rank else _group_to_start(options, surroundings)
    if group is not None:
        return _start_ranks(options, group)
    if surroundings.variables and options.nproc_per_node:
        raise UsageError(
            "this Slurm step has several tasks per node, one for each rank: leave out --nproc-per-node, "
            "or start one task per node (srun --ntasks-per-node 1)"
        )
    from megatron_vl.train import main

    os.environ.update(surroundings.variables if surroundings.is_rank else _alone())
    return main(options.fields)


def _group_to_start(options: TrainOptions, surroundings: Surroundings) -> list[str] | None:
    """The launcher's options that start this node's ranks; None if this process is the only rank."""
    config = _config(options.fields)
    nnodes = options.nnodes or surroundings.nnodes
    per_node = options.nproc_per_node or _gpus_here()
    meeting = _meeting(options, surroundings, nnodes)

    # These checks need no torch. Rank 0 makes all others (megatron_vl.training.resolve).
    validate(config, nnodes * per_node)
    check_inputs(config)
    for name, value in FOR_GPUS.items():
        os.environ.setdefault(name, value)
    if nnodes * per_node == 1:
        return None
    return ["--nnodes", str(nnodes), "--nproc-per-node", str(per_node), *meeting]


def _config(fields: list[str]) -> TrainConfig:
    if not fields:
        raise UsageError("no run is given: megatron-vl train --config RUN.yaml (--help explains every field)")
    try:
        return parse_config(fields)
    except RunConfigError as error:
        raise UsageError(f"{error}; megatron-vl train --help explains every field") from error


def _alone() -> dict[str, str]:
    """The variables that torchrun would set for a single rank."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return one | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def _gpus_here() -> int:
    import torch

    found = torch.cuda.device_count()
    if not found:
        raise UsageError(
            "torch sees no GPU here; give the number of ranks with --nproc-per-node N, also for a run on CPU"
        )
    return found


def _meeting(options: TrainOptions, surroundings: Surroundings, nnodes: int) -> list[str]:
    """The launcher's options that bring the nodes together."""
    if nnodes == 1:
        return ["--standalone"]
    host = options.master_addr or surroundings.master_addr
    if not host:
        raise UsageError(
            f"--nnodes {nnodes}: give --master-addr, the host name of one of the nodes, the same on all"
        )
    port = options.master_port or surroundings.master_port
    endpoint = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}"]
    return [*endpoint, "--rdzv-id", options.job_id or surroundings.job_id]


def _start_ranks(options: TrainOptions, group: list[str]) -> int:
    """Starts this node's ranks and waits for them."""
    from megatron_vl.launch import main as launch

    sys.stdout.flush()
    return launch([*group, "-m", "megatron_vl.train", *options.fields])
