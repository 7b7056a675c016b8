"""``megatron-vl demo``: runs the whole path on CPU, from one Hugging Face folder to a trained one."""

from __future__ import annotations

from .options import DemoOptions


def demo(options: DemoOptions) -> int:
    """Runs every step. Returns exit code 1 if a check fails."""
    from .steps import DemoMachine, run_demo

    machine = DemoMachine(options.platform, options.ranks, options.tp, options.pp)
    return run_demo(options.dir, options.steps, machine, options.raw)
