"""``megatron-vl checkpoint``: describes, checks and rolls back a run's checkpoints, and restarts its data."""

from collections import Counter
from pathlib import Path

from toolkit.common.layouts import layout_sizes_text

from .contents import find_step_dir, verify_checkpoint
from .options import CheckpointVerifyOptions, RestartDataOptions, RollbackOptions, ShowOptions

ROLLBACK_ADVICE = "go back to an earlier step with `megatron-vl checkpoint rollback`"


def show(options: ShowOptions) -> int:
    from megatron_vl.training.state.load import read_run_metadata
    from megatron_vl.weights.manifest import MANIFEST_FILE, read_manifest
    from megatron_vl.weights.run_folder import ABANDONED_DIR, saved_checkpoints

    step_dir = find_step_dir(options.path)
    run_json, manifest_path = read_run_metadata(step_dir), step_dir / "weights" / MANIFEST_FILE
    if not manifest_path.is_file():
        raise FileNotFoundError(f"{step_dir} has no weights/{MANIFEST_FILE}; {ROLLBACK_ADVICE}")
    manifest = read_manifest(manifest_path)
    for folder in (options.path, *sorted((options.path / ABANDONED_DIR).glob("*"))):
        name = "checkpoints" if folder == options.path else f"{ABANDONED_DIR}/{folder.name}"
        if steps := [str(saved.step) for saved in saved_checkpoints(folder)]:
            print(f"{name}: step {', '.join(steps)}")

    layout = run_json["layout"] | {"dp": run_json["dp"]}
    print(f"{step_dir}: step {run_json['step']}, {manifest['family']}, {len(manifest['tensors'])} tensors")
    print(f"  layout   {layout_sizes_text(layout)}, layers {layout['layers']}")
    print(f"  data     {run_json['num_workers']} loader workers, rows of {run_json['seq_len']} tokens")
    bytes_by_part: Counter[str] = Counter()
    for path in filter(Path.is_file, step_dir.rglob("*")):
        folders = path.parent.relative_to(step_dir).parts
        bytes_by_part[folders[0] if folders else "description"] += path.stat().st_size
    for part, size in sorted(bytes_by_part.items()):
        print(f"  {part:<11} {size / 1e6:12.1f} MB")

    expected = sorted([*run_json["files"], *(f"weights/{name}" for name in manifest["files"])])
    if missing := [name for name in expected if not (step_dir / name).is_file()]:
        print(f"missing: {', '.join(missing)}; {ROLLBACK_ADVICE}")
    return 1 if missing else 0


def verify(options: CheckpointVerifyOptions) -> int:
    step_dir = find_step_dir(options.path)
    if problems := verify_checkpoint(step_dir):
        print("\n".join(problems))
        print(f"{step_dir} is damaged; {ROLLBACK_ADVICE}, or start from weights that pass verification")
    else:
        print(f"{step_dir} is intact")
    return 1 if problems else 0


def rollback(options: RollbackOptions) -> int:
    from .rollback import roll_back

    abandoned_dir = roll_back(options.run, options.step)
    moved_text = f"what came after it is in {abandoned_dir}" if abandoned_dir else "nothing came after it"
    print(f"{options.run} is at step {options.step}; {moved_text}")
    return 0


def restart_data(options: RestartDataOptions) -> int:
    from .rollback import restart_data as restart_run_data

    print(
        f"{restart_run_data(options.run)}: the next start reads the data set from its start, and keeps"
        " weights and optimizer"
    )
    return 0
