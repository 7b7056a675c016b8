"""One rank of a training run. ``megatron-vl train`` starts the ranks; to start them by hand:

    torchrun --nproc-per-node N -m megatron_vl.train --config RUN.yaml [--section.field value ...]

On SIGTERM, SIGUSR1, SIGHUP or Ctrl-C to any rank, all ranks finish the current step, save and end with exit
code 0. Before the first step they end with 128 + the signal's number, and save nothing. torchrun kills its
ranks 30 seconds after SIGTERM; ``python -m megatron_vl.launch`` waits for them instead.
"""

from __future__ import annotations

import faulthandler
import os
import sys

from megatron_vl import host_memory
from megatron_vl.config import TrainConfig, parse, validate
from megatron_vl.core_fixes.register import check_core_version
from megatron_vl.errors import exit_code
from megatron_vl.parallel import failures
from megatron_vl.signals import outlive_readers, take_stop_signals
from megatron_vl.training.preflight import check_inputs


def main(argv: list[str] | None = None) -> int:
    """Parses the options, then trains.
    Returns the exit code: 0 when done, 1 when stopped with a message.

    If one of several ranks fails, all of them end with its message (see
    :mod:`megatron_vl.parallel.failures`).
    """
    outlive_readers()
    take_stop_signals()
    config = parse(argv)
    faulthandler.enable()  # a crash in native code then prints the Python stack
    try:
        train(config)
    except Exception as error:
        return _failed(error)
    finally:
        # If torch was not imported there is no process group, and importing it takes seconds.
        if "torch" in sys.modules:
            from megatron_vl.parallel.groups import end_groups

            end_groups()
    return 0


def train(config: TrainConfig) -> None:
    """Runs a training from its config to its end: resolve, build, restore, run. Collective.

    Raises:
        UserError: the run is impossible or cannot continue. The message says why.
        SystemExit: a signal asked a rank to stop before the first step.
    """
    # What needs no torch is refused before any process group starts.
    check_core_version()
    validate(config, launched_world_size())
    check_inputs(config)

    from megatron_vl.parallel.groups import from_first_rank, least_of_ranks
    from megatron_vl.training import loop, missing_sizes, resume, setup
    from megatron_vl.training.out_of_memory import explained
    from megatron_vl.training.resolve import Machine, resolve

    platform = setup.join_ranks(config)
    try:
        machine = Machine(platform.memory_gib(), least_of_ranks(host_memory.gib_per_rank(), platform.device))
        # Other nodes may see an older state of shared storage, and thousands of readers would overload it.
        resolved = from_first_rank(lambda: resolve(config, launched_world_size(), machine))
        missing_sizes.write_missing_sizes(resolved, platform)
        with explained(resolved):
            run = setup.build(resolved, platform)
        with setup.closed_on_failure(run), explained(resolved):
            resume.restore(run)
            loop.run_steps(run)
        setup.close(run)
    finally:
        failures.stop_alone()


def launched_world_size() -> int:
    """Number of ranks of this training, as torchrun sets it; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _failed(error: Exception) -> int:
    """Prints why the training ends: this rank's error, or that of the rank that failed first.

    Returns the exit code.
    """
    failures.tell_once(failures.report(error))
    failures.leave()
    return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
