"""``megatron-vl checkpoint``: describes, checks and rolls back a run's checkpoints, and restarts its data."""

from __future__ import annotations

from typing import Any

from toolkit.common.layouts import layout_sizes_text

from .contents import describe_checkpoint, find_step_dir, verify_checkpoint
from .options import CheckpointVerifyOptions, RestartDataOptions, RollbackOptions, ShowOptions

ROLLBACK_ADVICE = "go back to an earlier step with `megatron-vl checkpoint rollback`"


def show(options: ShowOptions) -> int:
    """Lists the checkpoints of a run and describes one of them. Returns 1 if files are missing."""
    from megatron_vl.weights.run_folder import ABANDONED_DIR, saved_checkpoints

    checkpoint_facts = describe_checkpoint(find_step_dir(options.path))
    steps_by_folder = {"": [saved.step for saved in saved_checkpoints(options.path)]}
    for folder in sorted((options.path / ABANDONED_DIR).glob("*")):
        steps_by_folder[f"{ABANDONED_DIR}/{folder.name}"] = [
            saved.step for saved in saved_checkpoints(folder)
        ]
    for folder_name, steps in steps_by_folder.items():
        if steps:
            print(f"{folder_name or 'checkpoints'}: step {', '.join(map(str, steps))}")
    print("\n".join(_checkpoint_lines(checkpoint_facts)))
    return 1 if checkpoint_facts["missing"] else 0


def _checkpoint_lines(checkpoint_facts: dict[str, Any]) -> list[str]:
    """Formats the result of :func:`describe_checkpoint`."""
    layout = checkpoint_facts["layout"] | {"dp": checkpoint_facts["data_parallel"]}
    text_lines = [
        f"{checkpoint_facts['checkpoint']}: step {checkpoint_facts['step']}, "
        f"{checkpoint_facts['family']}, {checkpoint_facts['tensors']} tensors",
        f"  layout   {layout_sizes_text(layout)}, layers {layout['layers']}",
        f"  data     {checkpoint_facts['loader_workers']} loader "
        f"workers, rows of {checkpoint_facts['seq_len']} tokens",
    ]
    for part_name, size_bytes in sorted(checkpoint_facts["bytes"].items()):
        text_lines.append(f"  {part_name:<11} {size_bytes / 1e6:12.1f} MB")
    if checkpoint_facts["missing"]:
        text_lines.append(f"missing: {', '.join(checkpoint_facts['missing'])}; {ROLLBACK_ADVICE}")
    return text_lines


def verify(options: CheckpointVerifyOptions) -> int:
    """Compares every file of a checkpoint with its hashes. Returns 1 if one differs."""
    step_dir = find_step_dir(options.path)
    problems = verify_checkpoint(step_dir)
    if problems:
        print("\n".join(problems))
        print(f"{step_dir} is damaged; {ROLLBACK_ADVICE}, or start from weights that pass verification")
    else:
        print(f"{step_dir} is intact")
    return 1 if problems else 0


def rollback(options: RollbackOptions) -> int:
    """Moves what a run saved after a step to a folder beside it."""
    from .rollback import roll_back

    abandoned_dir = roll_back(options.run, options.step)
    moved_text = f"what came after it is in {abandoned_dir}" if abandoned_dir else "nothing came after it"
    print(f"{options.run} is at step {options.step}; {moved_text}")
    return 0


def restart_data(options: RestartDataOptions) -> int:
    """Lets the next start of a run read its data set from the start."""
    from .rollback import restart_data as restart_run_data

    step_dir = restart_run_data(options.run)
    print(f"{step_dir}: the next start reads the data set from its start, and keeps weights and optimizer")
    return 0
