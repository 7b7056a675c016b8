"""Finds a run's checkpoints and checks them against their hashes."""

from pathlib import Path


def find_step_dir(run_or_step_dir: Path) -> Path:
    """Finds the step folder of a path: that folder itself, or the latest checkpoint of a run.

    Raises:
        FileNotFoundError: the folder holds no checkpoint of a run.
    """
    from megatron_vl.weights.manifest import MANIFEST_FILE
    from megatron_vl.weights.run_folder import find_latest_checkpoint

    if (run_or_step_dir / "run.json").is_file():
        return run_or_step_dir
    if (latest_checkpoint := find_latest_checkpoint(run_or_step_dir)) is None:
        hint = f"; it holds only weights, which `megatron-vl verify {run_or_step_dir}` checks"
        raise FileNotFoundError(
            f"{run_or_step_dir} holds no checkpoint of a run: looked for run.json and step_ folders"
            f"{hint * (run_or_step_dir / MANIFEST_FILE).is_file()}"
        )
    return latest_checkpoint.path


def verify_checkpoint(step_dir: Path) -> list[str]:
    """Lists what is wrong with a step folder, file by file. The list is empty if every byte is as written."""
    from converters.compare import verify_checkpoint_hashes
    from megatron_vl.training.state.load import verify_files
    from megatron_vl.weights.tensor_files import WeightsError

    problems = verify_files(step_dir)
    try:
        differences = verify_checkpoint_hashes(step_dir / "weights").differences
        problems += [f"{step_dir / 'weights'}: {each.name} {each.how}" for each in differences]
    except (WeightsError, OSError, ValueError) as error:
        problems.append(str(error))
    return problems
