"""``megatron-vl train``: starts the ranks of a run, acts as one of them, or prints its plan."""

from __future__ import annotations

import os
import sys

from megatron_vl.config import RunConfigError, TrainConfig, parse_config, validate
from megatron_vl.errors import UsageError, UserError
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
    """Trains, and returns the exit code: 0 if done or stopped by a signal, 1 if stopped with a message."""
    surroundings = read(os.environ)
    if surroundings.variables and options.nproc_per_node and not options.dry_run:
        raise UsageError(
            "this Slurm step has several tasks per node, one for each rank: leave out --nproc-per-node, "
            "or start one task per node (srun --ntasks-per-node 1)"
        )
    if surroundings.is_rank and not options.dry_run:
        return _be_a_rank(options.fields, surroundings.variables)

    config = _config(options.fields)
    if options.dry_run:
        from .dry_run import show

        show(config, options.nproc_per_node, options.nnodes or surroundings.nnodes, options.json)
        return 0

    nnodes = options.nnodes or surroundings.nnodes
    per_node = options.nproc_per_node or _gpus_here()
    _refuse(config, nnodes * per_node)
    for name, value in FOR_GPUS.items():
        os.environ.setdefault(name, value)
    if nnodes * per_node == 1:
        return _be_a_rank(options.fields, _alone())
    return _start_ranks(options, surroundings, nnodes, per_node)


def _config(fields: list[str]) -> TrainConfig:
    if not fields:
        raise UsageError("no run is given: megatron-vl train --config RUN.yaml (--help explains every field)")
    try:
        return parse_config(fields)
    except RunConfigError as error:
        raise UsageError(f"{error}; megatron-vl train --help explains every field") from error


def _refuse(config: TrainConfig, world: int) -> None:
    """Refuses an impossible or too large run once, before any process starts."""
    validate(config, world)
    from megatron_vl.planning.gpus import calibration_here
    from megatron_vl.spec.families import read_spec
    from megatron_vl.training.preflight import check_gpu_memory, resumed_from, split_of

    if config.platform == "cpu" or calibration_here() is None:
        return
    try:
        spec = read_spec(config.model.hf)
        layout = split_of(config, spec, world, resumed_from(config))
    except (UserError, OSError, ValueError):
        return  # the ranks report the error, after the checks that come before it
    check_gpu_memory(config, spec, layout, world)


def _be_a_rank(fields: list[str], variables: object) -> int:
    """Trains in this process as one rank."""
    os.environ.update(dict(variables))  # type: ignore[call-overload]
    from megatron_vl.train import main

    return main(fields)


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


def _start_ranks(options: TrainOptions, surroundings: Surroundings, nnodes: int, per_node: int) -> int:
    """Starts this node's ranks and waits for them."""
    from megatron_vl.launch import main as launch

    meeting = ["--standalone"]
    if nnodes > 1:
        host = options.master_addr or surroundings.master_addr
        if not host:
            raise UsageError(
                f"--nnodes {nnodes}: give --master-addr, the host name of one of the nodes, the same on all"
            )
        port = options.master_port or surroundings.master_port
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}"]
        meeting += ["--rdzv-id", options.job_id or surroundings.job_id]

    sys.stdout.flush()
    group = ["--nnodes", str(nnodes), "--nproc-per-node", str(per_node), *meeting]
    return launch([*group, "-m", "megatron_vl.train", *options.fields])
