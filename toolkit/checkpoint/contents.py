"""Reads what a run's checkpoints contain and checks them against their hashes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any


def find_step_dir(run_or_step_dir: Path) -> Path:
    """Finds the step folder of a path: that folder itself, or the latest checkpoint of a run.

    Raises:
        FileNotFoundError: the folder holds no checkpoint of a run.
    """
    from megatron_vl.weights.manifest import MANIFEST_FILE
    from megatron_vl.weights.run_folder import find_latest_checkpoint

    if (run_or_step_dir / "run.json").is_file():
        return run_or_step_dir
    latest_checkpoint = find_latest_checkpoint(run_or_step_dir)
    if latest_checkpoint is None:
        weights_hint = ""
        if (run_or_step_dir / MANIFEST_FILE).is_file():
            weights_hint = f"; it holds only weights, which `megatron-vl verify {run_or_step_dir}` checks"
        searched_text = "looked for run.json, latest.json and step_ folders"
        raise FileNotFoundError(
            f"{run_or_step_dir} holds no checkpoint of a run: {searched_text}{weights_hint}"
        )
    return latest_checkpoint.path


def describe_checkpoint(step_dir: Path) -> dict[str, Any]:
    """Describes a step folder: step, layout, model, sizes by part, and missing files.

    Raises:
        FileNotFoundError, CheckpointError, WeightsError: its weights or ``run.json`` are missing or damaged.
    """
    from megatron_vl.training.checkpoint import read_run_metadata
    from megatron_vl.weights.manifest import MANIFEST_FILE, read_manifest

    run_json = read_run_metadata(step_dir)
    if not (step_dir / "weights" / MANIFEST_FILE).is_file():
        raise FileNotFoundError(
            f"{step_dir} has no weights/{MANIFEST_FILE}; resume from another step with --checkpoint.step"
        )

    weights_manifest = read_manifest(step_dir / "weights" / MANIFEST_FILE)
    expected_files = sorted([*run_json["files"], *(f"weights/{name}" for name in weights_manifest["files"])])
    bytes_by_part: Counter[str] = Counter()
    for stored_file in filter(Path.is_file, step_dir.rglob("*")):
        folder_names = stored_file.parent.relative_to(step_dir).parts
        bytes_by_part[folder_names[0] if folder_names else "description"] += stored_file.stat().st_size

    return {
        "checkpoint": str(step_dir),
        "step": run_json["step"],
        "lineage": run_json["lineage"],
        "bad_samples": run_json.get("bad_samples"),
        "family": weights_manifest["family"],
        "tensors": len(weights_manifest["tensors"]),
        "layout": run_json["layout"],
        "data_parallel": run_json["dp"],
        "loader_workers": run_json["num_workers"],
        "seq_len": run_json["seq_len"],
        "bytes": bytes_by_part,
        "missing": [name for name in expected_files if not (step_dir / name).is_file()],
    }


def verify_checkpoint(step_dir: Path) -> list[str]:
    """Lists what is wrong with a step folder, file by file. The list is empty if every byte is as written."""
    from converters.compare import verify_checkpoint_hashes
    from megatron_vl.training.checkpoint import verify_files
    from megatron_vl.weights.tensor_files import WeightsError

    problems = verify_files(step_dir)
    try:
        for difference in verify_checkpoint_hashes(step_dir / "weights").differences:
            problems.append(f"{step_dir / 'weights'}: {difference.name} {difference.how}")
    except (WeightsError, OSError, ValueError) as error:
        problems.append(str(error))
    return problems


def read_lineage(run_dir: Path) -> dict[str, Any]:
    """The checkpoints of a run's folder: those that led to the latest one, and those that were abandoned.

    Returns:
        ``{"steps": [...], "present": [...], "abandoned": [...]}``, each entry with step, folder, branch and
        parent; empty lists for a single checkpoint.
    """
    from megatron_vl.weights.run_folder import SavedCheckpoint, split_by_branch

    def lineage_entry(saved_checkpoint: SavedCheckpoint) -> dict[str, Any]:
        lineage_facts = saved_checkpoint.lineage.as_json()
        shown_facts = {name: lineage_facts[name] for name in ("branch", "parent", "rollback", "serial")}
        return {"step": saved_checkpoint.step, "folder": saved_checkpoint.path.name, **shown_facts}

    present_checkpoints, abandoned_checkpoints = (
        ([], []) if (run_dir / "run.json").is_file() else split_by_branch(run_dir)
    )
    return {
        "steps": [saved.step for saved in present_checkpoints],
        "present": [lineage_entry(saved) for saved in present_checkpoints],
        "abandoned": [lineage_entry(saved) for saved in abandoned_checkpoints],
    }


def lineage_lines(run_lineage: dict[str, Any]) -> list[str]:
    """Formats the result of :func:`read_lineage`, one line per branch."""
    entries_by_branch: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry_kind in ("present", "abandoned"):
        for lineage_entry in run_lineage[entry_kind]:
            entries_by_branch.setdefault((entry_kind, lineage_entry["branch"]), []).append(lineage_entry)

    text_lines = []
    for (entry_kind, branch_name), branch_entries in entries_by_branch.items():
        step_numbers = ", ".join(str(lineage_entry["step"]) for lineage_entry in branch_entries)
        origin_note = ""
        if rollback_point := branch_entries[-1]["rollback"]:
            origin_note = (
                f", which began at step {rollback_point['step']} of branch {rollback_point['branch']}"
            )
        if entry_kind == "present":
            text_lines.append(f"checkpoints of steps {step_numbers} (branch {branch_name}{origin_note})")
            continue
        folder_names = ", ".join(lineage_entry["folder"] for lineage_entry in branch_entries)
        text_lines.append(
            f"abandoned: steps {step_numbers} of branch {branch_name}{origin_note}. They "
            "are used only if you ask for them (--checkpoint.step N --checkpoint.branch "
            f"{branch_name}); delete {folder_names} if you do not need them"
        )
    return text_lines
