"""``megatron-vl demo``: the README's commands one after the other, on CPU, and a table of what they prove."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from megatron_vl.system.errors import UserError
from megatron_vl.system.processes import kill_process_tree
from toolkit.cli import main

from .options import DemoOptions

TINY_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "layers": 6,
    "ffn_hidden_size": 352,
    "mrope_section": (4, 6, 6),
    "max_pixels": 252 * 252,  # at most 81 tokens per image, so that a laptop can train it
}
LAYOUT = "--parallel.tp 2 --parallel.pp 2 --parallel.layers 2,4"
"""The first stage also holds the vision tower, so it gets fewer layers."""
VIDEO_FPS, VIDEO_MAX_FRAMES = 2.0, 8
VIDEO_WORDS = f"--data.video_fps {VIDEO_FPS} --data.video_max_frames {VIDEO_MAX_FRAMES}"

Check = tuple[str, str, bool]  # what was checked, what was measured, whether it passed


def demo(options: DemoOptions) -> int:
    """Empties the folder and runs every command in it. Returns exit code 1 if a check fails."""
    from toolkit.demo.demo_data import ANSWER_BY_IMAGE, FILE_NAMES, IMAGE_QUESTION, write_raw_data

    start_time = time.perf_counter()
    folder, steps = options.dir, options.steps
    save_step = steps // 3
    clear_folder(folder)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # before torch is imported
    write_demo_checkpoint(folder / "hf")
    samples = json.loads(write_raw_data(folder / "raw").read_text())

    d = shlex.quote(str(folder))
    run(
        f"data convert --input {d}/raw/conversations.json --media-root {d}/raw/media --out {d}/dataset"
        " --val-fraction 0"
    )
    run(f"convert --hf {d}/hf --out {d}/full")
    run(f"split --checkpoint {d}/full {LAYOUT} --out {d}/shards")
    run(f"export --checkpoint {d}/shards --hf {d}/hf --out {d}/hf_again")
    is_same = run(f"verify {d}/hf {d}/hf_again", may_fail=True) == 0
    tensors = len(json.loads((folder / "hf" / "model.safetensors.index.json").read_text())["weight_map"])
    found = f"{tensors} tensors identical" if is_same else "tensors differ, see above"
    checks: list[Check] = [
        ("Hugging Face -> TP2 x PP2 (layers 2,4) -> Hugging Face returns every bit", found, is_same)
    ]

    # One process and one row a conversation: this loss depends on neither the layout nor the training.
    model = (
        f"--model.hf {d}/hf --data.path {d}/dataset --platform cpu --dtype float32 {VIDEO_WORDS}"
        " --data.seq_len 512 --data.num_workers 1 --optimizer.weight_decay 0.01"
    )
    once = (
        f"train --nproc-per-node 1 {model} --steps 1 --optimizer.lr 0 --optimizer.warmup_steps 0"
        f" --data.pack false --data.shuffle false --global_batch_size {len(samples)}"
    )
    run(f"{once} --model.checkpoint {d}/shards --checkpoint.dir {d}/evaluation_before")

    train = (
        f"train --nproc-per-node 4 {model} --model.checkpoint {d}/shards {LAYOUT}"
        f" --parallel.sequence_parallel true --steps {steps} --global_batch_size 4"
        f" --optimizer.lr 2e-3 --optimizer.schedule cosine --optimizer.warmup_steps {min(10, steps // 4)}"
        f" --checkpoint.dir {d}/run --checkpoint.interval {save_step}"
    )
    train_until_killed(train, folder, save_step, save_step + 3)
    print("the same command again resumes:")
    run(train)
    checks += check_training(read_metrics(folder / "run"), save_step)

    run(f"export --checkpoint {d}/run --hf {d}/hf --out {d}/hf_trained")
    code = run(f"verify {d}/hf {d}/hf_trained", may_fail=True)
    checks.append(("verify sees that training changed the weights", f"exit code {code}", code == 1))
    run(f"{once} --model.checkpoint {d}/run/step_{steps:08d}/weights --checkpoint.dir {d}/evaluation_after")
    checks.append(compare_losses(folder, "before training", "hf", samples))
    checks.append(compare_losses(folder, "after", "hf_trained", samples))
    run(
        f"generate --checkpoint {d}/hf_trained --data.path {d}/dataset --eval.split train"
        f" --out {d}/answers.jsonl {VIDEO_WORDS}"
    )
    checks += check_answers(folder / "answers.jsonl")
    exit_code = write_report(folder, checks, time.perf_counter() - start_time)
    print(f"the trained model answers; the right answer is {ANSWER_BY_IMAGE['chelsea']!r}:")
    run(
        f"generate --checkpoint {d}/hf_trained --image {d}/raw/media/{FILE_NAMES['chelsea']}"
        f" --prompt {shlex.quote(IMAGE_QUESTION)}"
    )
    return exit_code


def write_demo_checkpoint(hf_dir: Path) -> None:
    """Writes the small model that the demo trains, with random weights that are always the same."""
    import torch

    from toolkit.common.tiny_checkpoint import write_tiny_checkpoint
    from toolkit.demo.demo_data import conversation_texts

    write_tiny_checkpoint(hf_dir, "qwen2_5_vl", texts=conversation_texts(), dtype=torch.float32, **TINY_SIZES)


def start(command: str, stderr: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Shows a command and starts it with the programs of this Python's environment, activated or not."""
    print(f"$ megatron-vl {command}", flush=True)
    return subprocess.Popen([sys.executable, "-m", "toolkit", *shlex.split(command)], stderr=stderr)


def run(command: str, may_fail: bool = False) -> int:
    """Shows a command and runs it, a training in a process of its own. Returns its exit code."""
    if command.startswith("train "):
        exit_code = start(command).wait()
    else:  # here, where torch and transformers are imported already
        print(f"$ megatron-vl {command}", flush=True)
        exit_code = main(shlex.split(command))
        if exit_code == 130:  # of Ctrl-C, which `main` has caught
            raise KeyboardInterrupt
    if exit_code and not may_fail:
        raise UserError(f"the command above ended with exit code {exit_code}; its output says why")
    return exit_code


def clear_folder(folder: Path) -> None:
    marker_file = folder / ".megatron-vl-demo"
    if folder.exists() and any(folder.iterdir()) and not marker_file.exists():
        raise UserError(f"{folder} is not empty and was not written by an earlier demo; give another --dir")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker_file.touch()


def train_until_killed(command: str, folder: Path, save_step: int, goal_step: int) -> None:
    """Starts the training and kills all its processes (SIGKILL) a few steps after its first checkpoint."""
    run_dir, log_path = folder / "run", folder / "killed.log"
    with log_path.open("wb") as stderr:
        process = start(command, stderr)
    try:
        # A checkpoint is written in the background, so it may appear after later steps.
        while (
            not (run_dir / f"step_{save_step:08d}").is_dir() or read_metrics(run_dir)[-1]["step"] < goal_step
        ):
            if process.poll() is not None:
                raise UserError(f"the training ended before it was killed; {log_path} says why")
            time.sleep(0.2)
    finally:
        kill_process_tree(process.pid)
        process.wait()
    last_step = read_metrics(run_dir)[-1]["step"]
    print(f"(killed after step {last_step}, see {log_path}; the last checkpoint is from step {save_step})")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def check_training(metrics: list[dict[str, Any]], save_step: int) -> list[Check]:
    resumed = next(i for i in range(1, len(metrics)) if metrics[i]["step"] <= metrics[i - 1]["step"])
    starts = metrics[:resumed], metrics[resumed:]
    before, after = ({line["step"]: line["loss"] for line in lines} for lines in starts)
    repeated = before.keys() & after.keys()
    largest = max(abs(before[step] - after[step]) / before[step] for step in repeated)
    first, last = metrics[0]["loss"], sum(line["loss"] for line in metrics[-5:]) / 5
    skipped = sum(not line["updated"] for line in metrics)
    dropped = sum(count for line in metrics for name, count in line.items() if name.startswith("dropped/"))
    repeats = f"resumed at step {min(after)}; {len(repeated)} repeated steps differ by at most {largest:.1e}"
    is_repeated = min(after) == save_step + 1 and largest < 1e-6
    fell = f"{first:.3f} -> {last:.4f} in {metrics[-1]['step']} steps"
    lost = f"{skipped} skipped, {dropped} dropped"
    return [
        ("A killed run resumes from its checkpoint and repeats its losses", repeats, is_repeated),
        ("The loss has fallen to less than a tenth", fell, last < first / 10),
        ("No step was skipped, no sample was dropped", lost, skipped + dropped == 0),
    ]


def compare_losses(folder: Path, when: str, hf_name: str, samples: list[dict[str, Any]]) -> Check:
    """Compares the loss of all conversations in transformers with the trainer's, both in float32."""
    from toolkit.demo.reference import DemoReference

    reference = DemoReference(folder / hf_name, video_fps=VIDEO_FPS, video_max_frames=VIDEO_MAX_FRAMES)
    losses = [reference.assistant_loss(sample, folder / "raw" / "media") for sample in samples]
    tokens = sum(count for _, count in losses)
    loss = sum(total for total, _ in losses) / tokens
    found = read_metrics(folder / f"evaluation_{when.split()[0]}")[-1]
    error = abs(loss - found["loss"]) / loss
    return (
        f"Loss {when}: transformers' equals the trainer's",
        f"{loss:.6f} and {found['loss']:.6f}, {error:.1e} apart; {tokens} and {found['loss_tokens']} tokens",
        # Relative to the loss near zero after training, rounding errors are larger.
        error < (1e-4 if when == "after" else 1e-5)
        and tokens == found["loss_tokens"]
        and found["samples"] == len(samples),
    )


def check_answers(answers_path: Path) -> list[Check]:
    from toolkit.demo.demo_data import ANSWER_BY_IMAGE

    right: dict[bool, list[bool]] = {True: [], False: []}
    for line in map(json.loads, answers_path.read_text().splitlines()):
        taught, answer = line["reference"].strip(), line["answer"].strip()
        right[taught in ANSWER_BY_IMAGE.values()].append(answer == taught)
        print(f"{answer!r}", "as taught" if answer == taught else f"taught: {taught!r}")
    claims = {
        "One question about five photographs: transformers generates the right answers": right[True],
        "Several images, text only, video: answers as taught": right[False],
    }
    return [(what, f"{sum(each)} of {len(each)}", all(each)) for what, each in claims.items()]


def write_report(folder: Path, checks: list[Check], seconds: float) -> int:
    passed = all(check[2] for check in checks)
    lines = [{"what": what, "measured": measured, "passed": right} for what, measured, right in checks]
    (folder / "report.json").write_text(json.dumps({"passed": passed, "checks": lines}, indent=2) + "\n")
    table = Table("checked", "measured", "", title=f"Demo in {folder}, {seconds:.0f} s")
    for what, measured, is_right in checks:
        table.add_row(what, measured, "[green]ok[/]" if is_right else "[bold red]FAILED[/]")
    console = Console(highlight=False, width=max(110, Console().width))
    console.print(table)
    console.print(f"trained checkpoint: {folder / 'hf_trained'}")
    return 0 if passed else 1
