"""Reads what a run's checkpoints contain and checks them against their hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def find_step(path: Path) -> Path:
    """Finds the step folder for ``path``: ``path`` itself, or the latest one of a run.

    Raises:
        FileNotFoundError: ``path`` holds no checkpoint of a run.
    """
    from megatron_vl.weights.manifest import MANIFEST
    from megatron_vl.weights.run_folder import latest

    if (path / "run.json").is_file():
        return path
    saved = latest(path)
    if saved is None:
        weights = (
            f"; it holds only weights, which `megatron-vl verify {path}` checks"
            if (path / MANIFEST).is_file()
            else ""
        )
        looked = "looked for run.json, latest.json and step_ folders"

        raise FileNotFoundError(f"{path} holds no checkpoint of a run: {looked}{weights}")
    return saved.path


def describe(source: Path) -> dict[str, Any]:
    """Describes a step folder: step, layout, model, sizes by part, and missing files.

    Raises:
        FileNotFoundError, CheckpointError, WeightsError: its weights or ``run.json`` are missing or damaged.
    """
    from megatron_vl.training.checkpoint import read_run
    from megatron_vl.weights.manifest import MANIFEST, read_manifest

    saved = read_run(source)
    if not (source / "weights" / MANIFEST).is_file():
        raise FileNotFoundError(
            f"{source} has no weights/{MANIFEST}; resume from another step with --checkpoint.step"
        )

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
        "lineage": saved["lineage"],
        "bad_samples": saved.get("bad_samples"),
        "family": manifest["family"],
        "tensors": len(manifest["tensors"]),
        "layout": saved["layout"],
        "data_parallel": saved["dp"],
        "loader_workers": saved["num_workers"],
        "seq_len": saved["seq_len"],
        "bytes": sizes,
        "missing": [name for name in names if not (source / name).is_file()],
    }


def verify_checkpoint(source: Path) -> list[str]:
    """Lists what is wrong with a step folder, file by file. The list is empty if every byte is as written."""
    from converters.verify import check_hashes
    from megatron_vl.training.checkpoint import verify_files
    from megatron_vl.weights.tensor_files import WeightsError

    problems = verify_files(source)
    try:
        differences = check_hashes(source / "weights").differences
        problems += [
            f"{source / 'weights'}: {difference.name} {difference.how}" for difference in differences
        ]
    except (WeightsError, OSError, ValueError) as error:
        problems.append(str(error))
    return problems


def lineage_of(path: Path) -> dict[str, Any]:
    """The checkpoints of a run's folder: those that led to the latest one, and those that were abandoned.

    Returns:
        ``{"steps": [...], "present": [...], "abandoned": [...]}``, each entry with step, folder, branch and
        parent; empty lists for a single checkpoint.
    """
    from megatron_vl.weights.run_folder import Saved, by_branch

    def entry(saved: Saved) -> dict[str, Any]:
        facts = saved.lineage.as_json()
        shown = {name: facts[name] for name in ("branch", "parent", "rollback", "serial")}
        return {"step": saved.step, "folder": saved.path.name, **shown}

    present, left = ([], []) if (path / "run.json").is_file() else by_branch(path)
    return {
        "steps": [saved.step for saved in present],
        "present": [entry(saved) for saved in present],
        "abandoned": [entry(saved) for saved in left],
    }


def lineage_lines(found: dict[str, Any]) -> list[str]:
    """Formats the result of :func:`lineage_of`, one line per branch."""
    branches: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for kind in ("present", "abandoned"):
        for one in found[kind]:
            branches.setdefault((kind, one["branch"]), []).append(one)

    lines = []
    for (kind, branch), ones in branches.items():
        steps = ", ".join(str(one["step"]) for one in ones)
        back = ones[-1]["rollback"]
        began = f", which began at step {back['step']} of branch {back['branch']}" if back else ""
        if kind == "present":
            lines.append(f"checkpoints of steps {steps} (branch {branch}{began})")
            continue
        folders = ", ".join(one["folder"] for one in ones)
        lines.append(
            f"abandoned: steps {steps} of branch {branch}{began}. They are used only if you ask for them "
            f"(--checkpoint.step N --checkpoint.branch {branch}); delete {folders} if you do not need them"
        )
    return lines
