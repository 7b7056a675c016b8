"""``megatron-vl checkpoint show|verify``: what is in a run's checkpoint, and whether it is whole."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommands."""
    parser = subparsers.add_parser("checkpoint", help="look into a training run's checkpoints, and check that they are whole")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text, run in (
        (
            "show",
            "list a run's checkpoints by branch, or describe one of them; exit code 1 when files of it are missing",
            _show,
        ),
        ("verify", "read every file of a checkpoint and compare it with the hashes written beside it", _verify),
    ):
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        action.add_argument("path", type=Path, help="folder of a run (its latest checkpoint) or a step_ folder")
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=run, inputs=("path",))


def find_step(path: Path) -> Path:
    """The step folder meant by ``path``: itself, or the latest one of a run.

    Raises:
        FileNotFoundError: there is no checkpoint of a run.
    """
    from megatron_vl.run_folder import latest
    from megatron_vl.weights import MANIFEST

    if (path / "run.json").is_file():
        return path
    saved = latest(path)
    if saved is None:
        weights = f"; it holds weights alone, which `megatron-vl verify {path}` checks" if (path / MANIFEST).is_file() else ""
        looked = "looked for run.json, latest.json and step_ folders"
        raise FileNotFoundError(f"{path} holds no checkpoint of a run: {looked}{weights}")
    return saved.path


def describe(source: Path) -> dict[str, Any]:
    """Step, layout, model, sizes by part, and the files that should be there and are not."""
    from megatron_vl.training.checkpoint import read_run
    from megatron_vl.weights import MANIFEST, read_manifest

    saved = read_run(source)
    if not (source / "weights" / MANIFEST).is_file():
        raise FileNotFoundError(f"{source} lacks weights/{MANIFEST}; resume from another step with --checkpoint.step")
    manifest = read_manifest(source / "weights" / MANIFEST)
    names = sorted([*saved["files"], *(f"weights/{name}" for name in manifest["files"])])
    sizes: dict[str, int] = {}
    for file in source.rglob("*"):
        if file.is_file():
            part = file.relative_to(source).parts[0] if file.parent != source else "description"
            sizes[part] = sizes.get(part, 0) + file.stat().st_size
    return {
        "checkpoint": str(source),
        "step": saved["step"],
        "lineage": saved.get("lineage"),
        "bad_samples": saved.get("bad_samples"),
        "family": manifest["family"],
        "tensors": len(manifest["tensors"]),
        "layout": saved["layout"],
        "data_parallel": saved["dp"],
        "loader_workers": saved.get("num_workers"),
        "seq_len": saved.get("seq_len"),
        "bytes": sizes,
        "missing": [name for name in names if not (source / name).is_file()],
    }


def verify_checkpoint(source: Path) -> list[str]:
    """What is wrong with a step folder, file by file; empty when every byte is what was written."""
    from converters.verify import check_hashes
    from megatron_vl.training.checkpoint import verify_files
    from megatron_vl.weights import WeightsError

    problems = verify_files(source)
    try:
        differences = check_hashes(source / "weights").differences
        problems += [f"{source / 'weights'}: {difference.name} {difference.how}" for difference in differences]
    except (WeightsError, OSError, ValueError) as error:
        problems.append(str(error))
    return problems


def lineage_of(path: Path) -> dict[str, Any]:
    """The checkpoints of a run's folder: those that led to the latest one, and those that roll-backs left behind.

    Returns:
        ``{"steps": [...], "present": [...], "abandoned": [...]}``, each entry with step, folder, branch and parent; empty
        lists for a single checkpoint.
    """
    from megatron_vl.run_folder import Saved, by_branch

    def entry(saved: Saved) -> dict[str, Any]:
        facts = saved.lineage.as_json()
        told = {name: facts[name] for name in ("branch", "parent", "rollback", "serial")}
        return {"step": saved.step, "folder": saved.path.name, **told}

    present, left = ([], []) if (path / "run.json").is_file() else by_branch(path)
    return {
        "steps": [saved.step for saved in present],
        "present": [entry(saved) for saved in present],
        "abandoned": [entry(saved) for saved in left],
    }


def lineage_lines(found: dict[str, Any]) -> list[str]:
    """:func:`lineage_of` in words: one line a branch."""
    lines = []
    branches: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for kind in ("present", "abandoned"):
        for one in found[kind]:
            branches.setdefault((kind, one["branch"]), []).append(one)
    for (kind, branch), ones in branches.items():
        steps = ", ".join(str(one["step"]) for one in ones)
        back = ones[-1]["rollback"]
        began = f", which began at step {back['step']} of branch {back['branch']}" if back else ""
        if kind == "present":
            lines.append(f"checkpoints of steps {steps} (branch {branch}{began})")
        else:
            folders = ", ".join(one["folder"] for one in ones)
            lines.append(
                f"abandoned: steps {steps} of branch {branch}{began}. They are not used unless asked for (--checkpoint.step N "
                f"--checkpoint.branch {branch}); delete {folders} when they are not needed"
            )
    return lines


def _show(args: argparse.Namespace) -> int:
    facts = describe(find_step(args.path))
    found = lineage_of(args.path)
    if args.json:
        print(json.dumps(facts | found, indent=2))
        return 1 if facts["missing"] else 0
    for line in lineage_lines(found):
        print(line)
    layout = facts["layout"]
    print(f"{facts['checkpoint']}: step {facts['step']}, {facts['family']}, {facts['tensors']} tensors")
    shape = f"tp {layout['tp']} x pp {layout['pp']} x vpp {layout['vpp']} x dp {facts['data_parallel']}"
    if layout.get("ep", 1) * layout.get("etp", 1) > 1:
        shape += f", experts ep {layout['ep']} x etp {layout['etp']}"
    if facts["lineage"] and facts["lineage"]["parent"]:
        parent = facts["lineage"]["parent"]
        print(f"  lineage  branch {facts['lineage']['branch']}, trained from step {parent['step']} of branch {parent['branch']}")
    print(f"  layout   {shape}, layers {layout['layers']}")
    print(f"  data     {facts['loader_workers']} loader workers, rows of {facts['seq_len']} tokens")
    for part, size in sorted(facts["bytes"].items()):
        print(f"  {part:<11} {size / 1e6:12.1f} MB")
    if facts["missing"]:
        print(f"missing: {', '.join(facts['missing'])}; resume from another step with --checkpoint.step")
    return 1 if facts["missing"] else 0


def _verify(args: argparse.Namespace) -> int:
    source = find_step(args.path)
    problems = verify_checkpoint(source)
    if args.json:
        print(json.dumps({"checkpoint": str(source), "whole": not problems, "problems": problems}, indent=2))
    elif problems:
        print("\n".join(problems))
        print(f"{source} is damaged; resume from another step with --checkpoint.step, or from weights that verify")
    else:
        print(f"{source} is whole")
    return 1 if problems else 0
