"""``megatron-vl train``: starts the ranks of a run, acts as one of them, or checks it (``--dry-run``)."""

import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_vl.config import RunConfigError, TrainConfig, parse_config, validate_config
from megatron_vl.config.checks import check_inputs, check_output_dir, check_weights_exist
from megatron_vl.data.source.location import check_data_path
from megatron_vl.system.errors import UsageError
from megatron_vl.system.folder_kind import is_hub_name
from megatron_vl.system.processes import python_path_with_tools
from megatron_vl.system.signals import exit_on_signals, hide_native_warnings, requested_stop_signal
from megatron_vl.weights.run_folder import export_dir_path, find_latest_checkpoint
from toolkit.common.launch import GPU_ENVIRONMENT, single_rank_variables, usable_gpus

from .options import TrainOptions
from .prepare import as_converted, is_records, prepare_run, records_file, with_run_dir

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class LaunchEnvironment:
    """Facts that the launcher (torchrun, Slurm or none) gives the command."""

    is_rank: bool = False
    """Whether another program has started one process per rank, and this is one of them."""
    rank_variables: Mapping[str, str] = field(default_factory=dict)
    """The variables that torchrun would have set, if Slurm started the ranks."""
    nnodes: int = 1
    master_addr: str = ""
    master_port: int = 29500
    job_id: str = "megatron-vl"


def read_launch_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Reads torchrun's variables, then those of a Slurm step (``srun``).

    A step with more tasks than nodes has one task per rank. A step with one task per node starts the ranks of
    its node. A batch script without ``srun`` is not in a step and counts as a shell on that node.
    """
    if all(name in environ for name in TORCHRUN_VARIABLES):
        return LaunchEnvironment(is_rank=True)
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return LaunchEnvironment()

    task_count = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    node_count = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    job_id = environ.get("SLURM_JOB_ID", "0")
    master_addr = first_host(
        environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "localhost"
    )
    master_port = 20000 + int(job_id) % 10000  # two jobs on one node get different ports
    if task_count <= node_count:
        return LaunchEnvironment(False, {}, node_count, master_addr, master_port, job_id)
    rank_variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(task_count),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(-(-task_count // node_count)),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or master_addr,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(master_port),
    }
    return LaunchEnvironment(is_rank=True, rank_variables=rank_variables)


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm list, such as ``gpu003`` for ``gpu[003-006,010],login1``."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodelist)
    assert match is not None  # all parts may be empty
    return "".join(match.groups(""))


def train(options: TrainOptions) -> int:
    """Starts this node's ranks, becomes one of them, or checks and shows the run.

    Returns:
        The exit code: 0 if the training is done or was stopped by a signal, 1 if it stopped with a message.

    Raises:
        UsageError: the options do not fit together, or no run is given.
    """
    launch_environment, environment = read_launch_environment(os.environ), dict(os.environ)
    hide_native_warnings()
    run_args = with_run_dir(options.fields, _read_config(options.fields))
    if options.dry_run:
        exit_on_signals()
        _check_files(_read_config(run_args), options)
        from .dry_run import show_dry_run

        with as_converted(run_args, _read_config(run_args), options) as config:
            show_dry_run(config, options.nproc_per_node, options.nnodes or launch_environment.nnodes)
        return 0

    if not launch_environment.is_rank:
        launcher_arguments, run_args = _prepare_launch(options, launch_environment, run_args)
        if launcher_arguments is not None:
            from megatron_vl import launch

            sys.stdout.flush()
            exit_code = launch.main([*launcher_arguments, "-m", "megatron_vl.train", *run_args])
            if exit_code == 0 and not launch.received_signals and _is_first_node(options, launch_environment):
                _answer_samples(run_args, environment)
            return exit_code

    # From here on, this process is a rank: torchrun or Slurm started it as one, or it is the only one.
    if launch_environment.rank_variables and options.nproc_per_node:
        raise UsageError(
            "this Slurm step has several tasks per node, one for each rank: leave out --nproc-per-node, "
            "or start one task per node (srun --ntasks-per-node 1)"
        )
    # Imported late, because the process that only starts the ranks does not need Megatron-core.
    from megatron_vl.train import main

    os.environ.update(
        launch_environment.rank_variables if launch_environment.is_rank else single_rank_variables()
    )
    exit_code = main(run_args)
    if exit_code == 0 and os.environ["RANK"] == "0" and not requested_stop_signal():
        _answer_samples(run_args, environment)
    return exit_code


def _answer_samples(run_args: list[str], environment: Mapping[str, str]) -> None:
    """Lets the last step of a run that is done answer ``eval.answers`` samples, unless it has.

    The program that does it takes the place of this process, which frees the memory of a rank.
    """
    config = _read_config(run_args)
    run_dir = Path(config.checkpoint.dir)
    saved = find_latest_checkpoint(run_dir) if config.eval.answers else None
    if saved is None:
        return
    steps = json.loads((saved.path / "run.json").read_text())["fields"]["steps"]
    out_path = export_dir_path(run_dir, saved.step).with_name(f"{saved.path.name}_answers.jsonl")
    if saved.step < min(steps, config.stop_after or steps) or out_path.exists():
        return
    words = ["-P", "-m", "toolkit", "generate", "--checkpoint", str(run_dir), "--out", str(out_path)]
    variables = {name: value for name, value in environment.items() if name not in TORCHRUN_VARIABLES}
    variables["PYTHONPATH"] = python_path_with_tools()
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *words, *run_args], variables)


def _is_first_node(options: TrainOptions, launch_environment: LaunchEnvironment) -> bool:
    """Whether this is the node at the address where all nodes meet, which every run has."""
    if (options.nnodes or launch_environment.nnodes) == 1:
        return True
    host = _split_address(options.master_addr or launch_environment.master_addr)[0]
    if host == socket.gethostname():  # which need not resolve
        return True
    # The name may lead to another address than the one that the node's own name has (127.0.1.1).
    try:
        addresses = socket.getaddrinfo(host, None)
    except OSError as error:  # every node would wait for another one
        raise UsageError(f"--master-addr {host} cannot be found from this node ({error})") from error
    for family, *_, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address[0], 0))  # which only works for addresses of this machine
            return True
    return False


def _split_address(address: str) -> tuple[str, str]:
    """Host and port of ``HOST[:PORT]``; an IPv6 address has more colons, and no port."""
    host, _, port = address.partition(":") if address.count(":") == 1 else (address, "", "")
    return host, port


def _prepare_launch(
    options: TrainOptions, launch_environment: LaunchEnvironment, run_args: list[str]
) -> tuple[list[str] | None, list[str]]:
    """Checks the run, and prepares its model and data on this node.

    Returns:
        The launcher's options that start this node's ranks, None if this process is the only rank; and the
        fields of the run as words.
    """
    config = _read_config(run_args)
    nnodes = options.nnodes or launch_environment.nnodes
    meeting = _rendezvous_arguments(options, launch_environment, nnodes)
    is_first_node = _is_first_node(options, launch_environment)
    _check_files(config, options, needs_records=is_first_node)
    ranks_per_node = options.nproc_per_node or usable_gpus() or 1

    # These checks need no torch. Rank 0 makes all others (megatron_vl.training.resolve).
    validate_config(config, nnodes * ranks_per_node)
    run_args = prepare_run(run_args, config, options, is_first_node=is_first_node)
    check_inputs(_read_config(run_args))

    # The ranks inherit this environment.
    for name, value in GPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if nnodes * ranks_per_node == 1:
        return None, run_args
    return ["--nnodes", str(nnodes), "--nproc-per-node", str(ranks_per_node), *meeting], run_args


def _check_files(config: TrainConfig, options: TrainOptions, *, needs_records: bool = True) -> None:
    """Refuses what can be seen from the names of files, before torch is imported or data are converted."""
    if is_records(config.data.path):
        if needs_records and not records_file(Path(str(config.data.path))).exists():
            advice = "; `megatron-vl data convert --input FILE FILE --out DIR` makes several one data set"
            advice *= "," in str(config.data.path)
            raise RunConfigError(f"data.path {config.data.path} does not exist{advice}")
        needs_val = (config.eval.interval or config.eval.answers) and config.eval.split == "val"
        if needs_val and not options.val_fraction:
            raise RunConfigError(
                "evaluation needs samples that are set aside: give --val-fraction, such as 0.1"
            )
    else:
        if not config.data.is_synthetic:
            check_data_path(config.data.path)
        if given := options.given_flags():
            raise RunConfigError(
                f"data.path {config.data.path} holds no records, so leave out {', '.join(given)}"
            )
    check_output_dir("checkpoint.dir", config.checkpoint.dir)
    if is_hub_name(config.model.hf):
        return
    check_inputs(config)
    is_resumed = config.checkpoint.dir and any(Path(config.checkpoint.dir).glob("step_*"))
    adapter = config.lora.adapter
    if adapter and not is_resumed and not Path(adapter).exists():  # a run that continues needs it no longer
        raise RunConfigError(
            f"lora.adapter {adapter} does not exist; give a run with LoRA or a folder of adapters"
        )
    if not config.data.is_synthetic and not is_resumed:
        check_weights_exist(config)


def _read_config(run_args: list[str]) -> TrainConfig:
    if not run_args:
        raise UsageError("no run is given: --model.hf DIR --data.path FILE, or --config RUN.yaml; see --help")
    try:
        return parse_config(run_args)
    except RunConfigError as error:
        raise UsageError(f"{error}; megatron-vl train --help explains every field") from error


def _rendezvous_arguments(
    options: TrainOptions, launch_environment: LaunchEnvironment, nnodes: int
) -> list[str]:
    if nnodes == 1:
        return ["--standalone"]
    rendezvous_host, given_port = _split_address(options.master_addr or launch_environment.master_addr)
    if not rendezvous_host:
        raise UsageError(
            f"--nnodes {nnodes}: give --master-addr, the host name of one of the nodes, the same on all"
        )
    try:
        socket.getaddrinfo(own_name := socket.gethostname(), None)
    except OSError as error:
        raise UsageError(
            f"this node's own name, {own_name}, leads to no address ({error}), and torch's launcher and Gloo "
            "need one: add the name to /etc/hosts"
        ) from error
    endpoint = f"{rendezvous_host}:{given_port or launch_environment.master_port}"
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", launch_environment.job_id]
