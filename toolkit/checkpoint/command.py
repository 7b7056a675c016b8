"""``megatron-vl checkpoint show | verify``: describes a run's checkpoints and checks their hashes."""

from __future__ import annotations

import json
from typing import Any

from toolkit.layouts import layout_sizes_text

from .contents import describe_checkpoint, find_step_dir, lineage_lines, read_lineage, verify_checkpoint
from .options import CheckpointVerifyOptions, ShowOptions


def show(options: ShowOptions) -> int:
    """Lists the checkpoints of a run and describes one of them. Returns 1 if files are missing."""
    checkpoint_facts = describe_checkpoint(find_step_dir(options.path))
    run_lineage = read_lineage(options.path)
    if options.json:
        print(json.dumps(checkpoint_facts | run_lineage, indent=2))
    else:
        print("\n".join(lineage_lines(run_lineage) + _checkpoint_lines(checkpoint_facts)))
    return 1 if checkpoint_facts["missing"] else 0


def _checkpoint_lines(checkpoint_facts: dict[str, Any]) -> list[str]:
    """Formats the result of :func:`describe_checkpoint`."""
    text_lines = [
        f"{checkpoint_facts['checkpoint']}: step {checkpoint_facts['step']}, "
        f"{checkpoint_facts['family']}, {checkpoint_facts['tensors']} tensors"
    ]
    if parent_checkpoint := checkpoint_facts["lineage"]["parent"]:
        text_lines.append(
            f"  lineage  branch {checkpoint_facts['lineage']['branch']}, trained from "
            f"step {parent_checkpoint['step']} of branch {parent_checkpoint['branch']}"
        )
    layout = checkpoint_facts["layout"] | {"dp": checkpoint_facts["data_parallel"]}
    text_lines += [
        f"  layout   {layout_sizes_text(layout)}, layers {layout['layers']}",
        f"  data     {checkpoint_facts['loader_workers']} loader "
        f"workers, rows of {checkpoint_facts['seq_len']} tokens",
    ]
    for part_name, size_bytes in sorted(checkpoint_facts["bytes"].items()):
        text_lines.append(f"  {part_name:<11} {size_bytes / 1e6:12.1f} MB")
    if checkpoint_facts["missing"]:
        text_lines.append(
            f"missing: {', '.join(checkpoint_facts['missing'])}; "
            "resume from another step with --checkpoint.step"
        )
    return text_lines


def verify(options: CheckpointVerifyOptions) -> int:
    """Compares every file of a checkpoint with its hashes. Returns 1 if one differs."""
    step_dir = find_step_dir(options.path)
    problems = verify_checkpoint(step_dir)
    if options.json:
        print(
            json.dumps({"checkpoint": str(step_dir), "whole": not problems, "problems": problems}, indent=2)
        )
    elif problems:
        print("\n".join(problems))
        print(
            f"{step_dir} is damaged; resume from another step with --checkpoint.step, "
            "or start from weights that pass verification"
        )
    else:
        print(f"{step_dir} is intact")
    return 1 if problems else 0
