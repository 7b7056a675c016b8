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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_vl.config import TrainConfig, parse_or_exit
from megatron_vl.parallel import failures
from megatron_vl.system import host_memory
from megatron_vl.system.errors import exit_code_of_error
from megatron_vl.system.signals import handle_stop_signals, hide_native_warnings, survive_closed_outputs

if TYPE_CHECKING:
    from megatron_vl.spec.families import ModelSpec
    from megatron_vl.training.hooks import Hook


def main(argv: list[str] | None = None) -> int:
    """Parses the options, then trains. Returns the exit code: 0 if the run is done."""
    return run_rank(lambda: train(parse_or_exit(argv)))


def run_rank(work: Callable[[], object]) -> int:
    """Does the work of a rank. Returns its exit code.

    If one of several ranks fails, all of them end with its message (see
    :mod:`megatron_vl.parallel.failures`).
    """
    survive_closed_outputs()
    hide_native_warnings()
    handle_stop_signals()
    faulthandler.enable()  # a crash in native code then prints the Python stack
    try:
        work()
    except Exception as error:
        failures.print_failure_once(failures.report_failure(error))  # that of the rank that failed first
        failures.exit_after_failure()
        return exit_code_of_error(error)
    finally:
        # If torch was not imported, there is no process group, and importing it would take seconds.
        if "torch" in sys.modules:
            from megatron_vl.parallel.process_groups import destroy_groups

            destroy_groups()
    return 0


def train(config: TrainConfig, spec: ModelSpec | None = None, hooks: Sequence[Hook] = ()) -> None:
    """Runs a training from its config to its end: resolve, build, restore, run. Collective.

    Args:
        spec: the model's sizes, if they are not those of ``model.hf``.
        hooks: further hooks of the trainer.

    Raises:
        UserError: the run is impossible or cannot continue. The message says why.
        SystemExit: a signal asked a rank to stop before the first step.
    """
    from megatron_vl.parallel.process_groups import broadcast_from_rank_0, min_over_ranks
    from megatron_vl.parallel.start import join_ranks
    from megatron_vl.training.missing_sizes import write_missing_sizes
    from megatron_vl.training.out_of_memory import explain_memory_errors
    from megatron_vl.training.passes import with_counted_steps
    from megatron_vl.training.resolve import MachineMemory, resolve_run
    from megatron_vl.training.trainer import Trainer

    platform = join_ranks(config)
    try:
        machine_memory = MachineMemory(
            platform.total_memory_gib(), min_over_ranks(host_memory.available_gib_per_rank(), platform.device)
        )
        # Other nodes may see an older state of shared storage, and thousands of readers would overload it.
        resolved_run = broadcast_from_rank_0(
            lambda: resolve_run(config, launched_world_size(), machine_memory, spec=spec)
        )
        write_missing_sizes(resolved_run, platform)
        resolved_run = with_counted_steps(resolved_run, launched_world_size())
        with Trainer(resolved_run, platform, hooks) as trainer, explain_memory_errors(resolved_run):
            trainer.build()
            trainer.restore()
            trainer.run()
    finally:
        failures.stop_single_rank_monitor()


def launched_world_size() -> int:
    """Number of ranks of this training, as torchrun sets it; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


if __name__ == "__main__":
    sys.exit(main())
