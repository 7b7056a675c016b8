"""``megatron-vl checkpoint show | verify``: describes a run's checkpoints and checks their hashes."""

from __future__ import annotations

import json

from .contents import describe, find_step, lineage_lines, lineage_of, verify_checkpoint
from .options import CheckpointVerifyOptions, ShowOptions


def show(options: ShowOptions) -> int:
    """Lists the checkpoints of a run and describes one of them. Returns 1 if files are missing."""
    facts = describe(find_step(options.path))
    found = lineage_of(options.path)
    if options.json:
        print(json.dumps(facts | found, indent=2))
        return 1 if facts["missing"] else 0

    for line in lineage_lines(found):
        print(line)
    layout = facts["layout"]
    print(f"{facts['checkpoint']}: step {facts['step']}, {facts['family']}, {facts['tensors']} tensors")
    context = f" x cp {layout['cp']}" if "cp" in layout else ""
    shape = (
        f"tp {layout['tp']}{context} x pp {layout['pp']} x vpp {layout['vpp']} x dp {facts['data_parallel']}"
    )
    if layout["ep"] * layout["etp"] > 1:
        shape += f", experts ep {layout['ep']} x etp {layout['etp']}"
    if parent := facts["lineage"]["parent"]:
        print(
            f"  lineage  branch {facts['lineage']['branch']}, trained from step {parent['step']} of branch "
            f"{parent['branch']}"
        )

    print(f"  layout   {shape}, layers {layout['layers']}")
    print(f"  data     {facts['loader_workers']} loader workers, rows of {facts['seq_len']} tokens")
    for part, size in sorted(facts["bytes"].items()):
        print(f"  {part:<11} {size / 1e6:12.1f} MB")
    if facts["missing"]:
        print(f"missing: {', '.join(facts['missing'])}; resume from another step with --checkpoint.step")
    return 1 if facts["missing"] else 0


def verify(options: CheckpointVerifyOptions) -> int:
    """Compares every file of a checkpoint with its hashes. Returns 1 if one differs."""
    source = find_step(options.path)
    problems = verify_checkpoint(source)
    if options.json:
        print(json.dumps({"checkpoint": str(source), "whole": not problems, "problems": problems}, indent=2))
    elif problems:
        print("\n".join(problems))
        print(
            f"{source} is damaged; resume from another step with --checkpoint.step, "
            "or start from weights that pass verification"
        )
    else:
        print(f"{source} is intact")
    return 1 if problems else 0
