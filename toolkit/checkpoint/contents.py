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
        raise FileNotFoundError(
            f"{run_or_step_dir} holds no checkpoint of a run: looked for run.json and step_ folders"
            f"{weights_hint}"
        )
    return latest_checkpoint.path


def describe_checkpoint(step_dir: Path) -> dict[str, Any]:
    """Describes a step folder: step, layout, model, sizes by part, and missing files.

    Raises:
        FileNotFoundError, CheckpointError, WeightsError: its weights or ``run.json`` are missing or damaged.
    """
    from megatron_vl.training.state.load import read_run_metadata
    from megatron_vl.weights.manifest import MANIFEST_FILE, read_manifest

    run_json = read_run_metadata(step_dir)
    if not (step_dir / "weights" / MANIFEST_FILE).is_file():
        raise FileNotFoundError(
            f"{step_dir} has no weights/{MANIFEST_FILE}; go back to an earlier step with `megatron-vl"
            " checkpoint rollback`"
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
    from megatron_vl.training.state.load import verify_files
    from megatron_vl.weights.tensor_files import WeightsError

    problems = verify_files(step_dir)
    try:
        for difference in verify_checkpoint_hashes(step_dir / "weights").differences:
            problems.append(f"{step_dir / 'weights'}: {difference.name} {difference.how}")
    except (WeightsError, OSError, ValueError) as error:
        problems.append(str(error))
    return problems
