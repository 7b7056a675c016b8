"""``megatron-vl checkpoint show | verify``: describes a run's checkpoints and checks their hashes."""

from __future__ import annotations

import json

from .contents import describe_checkpoint, find_step_dir, lineage_lines, read_lineage, verify_checkpoint
from .options import CheckpointVerifyOptions, ShowOptions


def show(options: ShowOptions) -> int:
    """Lists the checkpoints of a run and describes one of them. Returns 1 if files are missing."""
    checkpoint_facts = describe_checkpoint(find_step_dir(options.path))
    run_lineage = read_lineage(options.path)
    if options.json:
        print(json.dumps(checkpoint_facts | run_lineage, indent=2))
        return 1 if checkpoint_facts["missing"] else 0

    for lineage_line in lineage_lines(run_lineage):
        print(lineage_line)
    layout = checkpoint_facts["layout"]
    print(
        f"{checkpoint_facts['checkpoint']}: step {checkpoint_facts['step']}, "
        f"{checkpoint_facts['family']}, {checkpoint_facts['tensors']} tensors"
    )
    context = f" x cp {layout['cp']}" if "cp" in layout else ""
    layout_text = (
        f"tp {layout['tp']}{context} x pp {layout['pp']} x vpp "
        f"{layout['vpp']} x dp {checkpoint_facts['data_parallel']}"
    )
    if layout["ep"] * layout["etp"] > 1:
        layout_text += f", experts ep {layout['ep']} x etp {layout['etp']}"
    if parent_checkpoint := checkpoint_facts["lineage"]["parent"]:
        print(
            f"  lineage  branch {checkpoint_facts['lineage']['branch']}, trained from "
            f"step {parent_checkpoint['step']} of branch {parent_checkpoint['branch']}"
        )

    print(f"  layout   {layout_text}, layers {layout['layers']}")
    print(
        f"  data     {checkpoint_facts['loader_workers']} loader "
        f"workers, rows of {checkpoint_facts['seq_len']} tokens"
    )
    for part_name, size_bytes in sorted(checkpoint_facts["bytes"].items()):
        print(f"  {part_name:<11} {size_bytes / 1e6:12.1f} MB")
    if checkpoint_facts["missing"]:
        print(
            f"missing: {', '.join(checkpoint_facts['missing'])}; "
            "resume from another step with --checkpoint.step"
        )
    return 1 if checkpoint_facts["missing"] else 0


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
