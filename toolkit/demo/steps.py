"""Runs the demo step by step.

It shows every command as a user would type it, and a table with the measurement for each claim.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from megatron_vl.errors import UserError
from toolkit.demo import demo_data
from toolkit.demo.reference import DemoReference
from toolkit.process_tree import kill_process_tree
from toolkit.tiny_checkpoint import TinySizes, write_tiny_checkpoint

TINY_SIZES = TinySizes(
    hidden_size=128,
    layers=6,
    ffn_hidden_size=352,
    heads=4,
    kv_heads=2,
    mrope_section=(4, 6, 6),
    text_vocab_size=400,
    # At most 81 tokens per picture, so that a laptop can train it.
    max_pixels=252 * 252,
)
VIDEO_FPS = 2.0
VIDEO_MAX_FRAMES = 8


@dataclass(frozen=True)
class DemoMachine:
    """The machine that the demo runs on, and the layout of the model."""

    platform: str = "cpu"
    world_size: int = 4
    tp_size: int = 2
    pp_size: int = 2

    @property
    def dtype(self) -> str:
        return "float32" if self.platform == "cpu" else "bfloat16"

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Decoder layers of each stage. The first stage also holds the vision tower, so it gets fewer."""
        if self.pp_size == 1:
            return (TINY_SIZES.layers,)
        even_layers = TINY_SIZES.layers // self.pp_size
        other_layers = [even_layers - 1, *[even_layers] * (self.pp_size - 2)]
        return (*other_layers, TINY_SIZES.layers - sum(other_layers))

    @property
    def is_deterministic(self) -> bool:
        """Whether results are the same bits in every run.

        This holds for float32 on CPU, but not for bf16 on GPUs, where attention's backward pass sums in any
        order.
        """
        return self.platform == "cpu"


@dataclass
class DemoCheck:
    """One line of the final table."""

    what: str
    measured: str
    passed: bool


@dataclass
class DemoRun:
    """A demo in ``demo_dir``: its paths, its checks, and the seconds of each part."""

    demo_dir: Path
    num_steps: int
    machine: DemoMachine = field(default_factory=DemoMachine)
    raw_data: Path | None = None
    """Raw data of an earlier demo to use; None: new data are made."""
    console: Console = field(
        default_factory=lambda: Console(highlight=False, width=max(110, Console().width))
    )
    checks: list[DemoCheck] = field(default_factory=list)
    seconds_by_part: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hf_dir = self.demo_dir / "hf"
        self.raw_dir = self.demo_dir / "raw"
        self.dataset_dir = self.demo_dir / "dataset"
        self.run_yaml = self.demo_dir / "run.yaml"
        self.run_dir = self.demo_dir / "run"
        self.exported_dir = self.demo_dir / "hf_trained"
        self.save_step = max(1, self.num_steps // 3)

    @contextmanager
    def timed_part(self, part_title: str) -> Iterator[None]:
        """Prints a heading and times the part."""
        self.console.rule(f"[bold]{len(self.seconds_by_part) + 1}. {part_title}", align="left")
        start = time.perf_counter()
        yield
        self.seconds_by_part[part_title] = round(time.perf_counter() - start, 1)

    def record_check(self, claim_text: str, measured: str, passed: bool) -> None:
        self.checks.append(DemoCheck(claim_text, measured, passed))

    def run_command(self, *command: str | Path, may_fail: bool = False) -> int:
        """Shows a command and runs it. Returns its exit code.

        Raises:
            UserError: the command fails, and ``may_fail`` does not allow that.
        """
        exit_code = self.start_command(*command).wait()
        if exit_code and not may_fail:
            raise UserError(f"the command above ended with exit code {exit_code}; its output says why")
        return exit_code

    def start_command(self, *command: str | Path, stderr: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        """Shows a command and starts it with the programs of this Python's environment, activated or not."""
        command_words = [str(word) for word in command]
        self.console.print(f"[bold green]$[/] {shlex.join(command_words)}", soft_wrap=True)
        process_environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return subprocess.Popen(
            [sys.executable, "-m", "toolkit", *command_words[1:]], env=process_environment, stderr=stderr
        )

    def train_command(self, *options: str | Path, world_size: int | None = None) -> tuple[str | Path, ...]:
        """The trainer's command line for this demo's group of processes, or for ``world_size`` processes."""
        processes = str(world_size or self.machine.world_size)
        return ("megatron-vl", "train", "--nproc-per-node", processes, "--config", self.run_yaml, *options)


def run_demo(
    demo_dir: Path, num_steps: int, machine: DemoMachine | None = None, raw_data: Path | None = None
) -> int:
    """Empties ``demo_dir`` and runs all steps in it. Returns exit code 1 if a check failed."""
    # Every claim below is checked with the commands that a user would type.
    machine = machine or DemoMachine()
    demo = DemoRun(demo_dir, num_steps, machine, raw_data)
    _clear_folder(demo_dir)
    start_time = time.perf_counter()

    with demo.timed_part("A small Qwen2.5-VL checkpoint, and conversations about real photographs"):
        prepare_inputs(demo)
    with demo.timed_part("Conversations to WebDataset shards for Energon"):
        input_arguments = (
            "--input",
            demo.raw_dir / "conversations.json",
            "--media-root",
            demo.raw_dir / "media",
        )
        output_arguments = ("--out", demo.dataset_dir, "--val-fraction", "0")
        demo.run_command("megatron-vl", "data", "convert", *input_arguments, *output_arguments)

    layout_text = f"TP{machine.tp_size} x PP{machine.pp_size}"
    with demo.timed_part(f"Weights: Hugging Face -> Megatron -> {layout_text} shards, and back"):
        check_round_trip(demo)

    # One process, so that these losses depend neither on the layout nor on the training below.
    with demo.timed_part("The trainer's loss before training, in one process"):
        metrics_before = evaluate_weights(demo, demo.demo_dir / "shards", "before")
    with demo.timed_part(f"Training in {machine.world_size} processes, killed on the way"):
        train_until_killed(demo)
    with demo.timed_part("The same command again resumes"):
        demo.run_command(*demo.train_command())
        check_training(demo)

    with demo.timed_part("Export, and the trainer's loss of the final weights in one process"):
        metrics_after = export_weights(demo)
    with demo.timed_part("Both folders in transformers"):
        initial_reference = _open_reference(demo.hf_dir)
        tolerance = 1e-5 if machine.is_deterministic else 1e-2
        compare_losses(demo, initial_reference, "before training", metrics_before, tolerance)

        trained_reference = _open_reference(demo.exported_dir)
        # Relative to a loss near zero, rounding errors are larger.
        tolerance = 1e-4 if machine.is_deterministic else 0.1
        compare_losses(demo, trained_reference, "after", metrics_after, tolerance)
        compare_answers(demo, trained_reference)

    demo.seconds_by_part["total"] = round(time.perf_counter() - start_time, 1)
    return write_report(demo)


def _clear_folder(demo_dir: Path) -> None:
    """Empties the folder of an earlier demo. Refuses any other folder that is not empty."""
    marker_file = demo_dir / ".megatron-vl-demo"
    if demo_dir.exists() and any(demo_dir.iterdir()) and not marker_file.exists():
        raise UserError(f"{demo_dir} is not empty and was not written by an earlier demo; give another --dir")
    shutil.rmtree(demo_dir, ignore_errors=True)
    demo_dir.mkdir(parents=True)
    marker_file.touch()


def _run_settings(demo: DemoRun) -> dict[str, Any]:
    return {
        "model": {"hf": str(demo.hf_dir), "checkpoint": str(demo.demo_dir / "shards")},
        "parallel": {
            "tp": demo.machine.tp_size,
            "pp": demo.machine.pp_size,
            "layers": list(demo.machine.layers_per_stage),
            "sequence_parallel": demo.machine.tp_size > 1,
        },
        "data": {
            "path": str(demo.dataset_dir),
            "seq_len": 512,
            "num_workers": 1,
            "video_fps": VIDEO_FPS,
            "video_max_frames": VIDEO_MAX_FRAMES,
        },
        "optimizer": {
            "lr": 2e-3,
            "warmup_steps": min(10, demo.num_steps // 4),
            "schedule": "cosine",
            "weight_decay": 0.01,
        },
        "checkpoint": {"dir": str(demo.run_dir), "interval": demo.save_step},
        "steps": demo.num_steps,
        "global_batch_size": 4,
        "dtype": demo.machine.dtype,
        "platform": demo.machine.platform,
    }


def prepare_inputs(demo: DemoRun) -> None:
    """Writes the checkpoint, the raw data and the run's YAML."""
    write_tiny_checkpoint(
        demo.hf_dir, "qwen2_5_vl", texts=demo_data.conversation_texts(), dtype=torch.float32, sizes=TINY_SIZES
    )
    if demo.raw_data:
        shutil.copytree(demo.raw_data, demo.raw_dir)
        conversations_path = demo.raw_dir / "conversations.json"
    else:
        conversations_path = demo_data.write_raw_data(demo.raw_dir)

    demo.run_yaml.write_text(yaml.safe_dump(_run_settings(demo), sort_keys=False))
    num_parameters = sum(torch.Size(shape).numel() for shape in _tensor_shapes(demo.hf_dir))
    demo.console.print(
        f"{demo.hf_dir}: {num_parameters / 1e6:.2f} M parameters, random; "
        f"{conversations_path}: {len(_read_samples(demo))} conversations"
    )
    demo.console.print(f"{demo.run_yaml}: the configuration of the training below")


def _tensor_shapes(hf_dir: Path) -> Iterator[list[int]]:
    from safetensors import safe_open

    for file_path in sorted(hf_dir.glob("*.safetensors")):
        with safe_open(file_path, framework="pt") as opened_file:
            for name in opened_file.keys():
                yield opened_file.get_slice(name).get_shape()


def _read_samples(demo: DemoRun) -> list[dict[str, Any]]:
    return json.loads((demo.raw_dir / "conversations.json").read_text())


def check_round_trip(demo: DemoRun) -> None:
    """Converts Hugging Face -> unsplit -> shards -> Hugging Face, and compares the folders bit for bit."""
    full_dir = demo.demo_dir / "full"
    shards_dir = demo.demo_dir / "shards"
    hf_again_dir = demo.demo_dir / "hf_again"
    tp_size = demo.machine.tp_size
    pp_size = demo.machine.pp_size
    layers = ",".join(map(str, demo.machine.layers_per_stage))

    demo.run_command("megatron-vl", "convert", "--hf", demo.hf_dir, "--out", full_dir)
    layout_arguments = ("--tp", str(tp_size), "--pp", str(pp_size), "--layers", layers)
    demo.run_command("megatron-vl", "split", "--checkpoint", full_dir, *layout_arguments, "--out", shards_dir)
    demo.run_command(
        "megatron-vl", "export", "--checkpoint", shards_dir, "--hf", demo.hf_dir, "--out", hf_again_dir
    )

    exit_code = demo.run_command("megatron-vl", "verify", demo.hf_dir, hf_again_dir, may_fail=True)
    num_tensors = sum(1 for _ in _tensor_shapes(demo.hf_dir))
    result_text = f"{num_tensors} tensors identical" if exit_code == 0 else "tensors differ, see above"
    demo.record_check(
        f"Hugging Face -> TP{tp_size} x PP{pp_size} (layers {layers}) -> Hugging Face returns every bit",
        result_text,
        exit_code == 0,
    )


def train_until_killed(demo: DemoRun) -> None:
    """Starts the training and kills all its processes (SIGKILL) a few steps after its first checkpoint."""
    log_path = demo.demo_dir / "killed.log"
    with log_path.open("wb") as stderr:
        process = demo.start_command(*demo.train_command(), stderr=stderr)
        goal_step = min(demo.save_step + 3, demo.num_steps - 1)
        checkpoint_dir = demo.run_dir / f"step_{demo.save_step:08d}"

        def is_far_enough() -> bool:
            # A checkpoint is written in the background, so it may appear after later steps.
            has_goal_step = any(line["step"] >= goal_step for line in read_metrics(demo.run_dir))
            return has_goal_step and checkpoint_dir.is_dir()

        while process.poll() is None and not is_far_enough():
            time.sleep(0.2)

        if process.poll() is not None:
            raise UserError(
                f"the training ended with exit code {process.returncode} "
                f"before it was killed; {log_path} says why"
            )
        kill_process_tree(process.pid)
        process.wait()

    last_step = read_metrics(demo.run_dir)[-1]["step"]
    demo.console.print(
        f"(killed after step {last_step}, see {log_path}; the last checkpoint is from step {demo.save_step})"
    )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Reads the lines of a run's ``metrics.jsonl``, except an incomplete last line."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []

    step_metrics: list[dict[str, Any]] = []
    for line in lines:
        if line.endswith("\n"):
            step_metrics.append(json.loads(line))
    return step_metrics


def _resume_lines(metrics_lines: list[dict[str, Any]]) -> list[int]:
    """Indices of the lines at which a run resumed: their step was done before."""
    resume_lines = []
    for i in range(1, len(metrics_lines)):
        if metrics_lines[i]["step"] <= metrics_lines[i - 1]["step"]:
            resume_lines.append(i)
    return resume_lines


def check_training(demo: DemoRun) -> None:
    """Checks that the steps repeated after the kill have the same losses, and that the loss has fallen."""
    metrics_lines = read_metrics(demo.run_dir)
    _check_repeated_losses(demo, metrics_lines)
    first_loss = metrics_lines[0]["loss"]
    last_loss = sum(line["loss"] for line in metrics_lines[-5:]) / 5
    demo.record_check(
        "The loss has fallen to less than a tenth",
        f"{first_loss:.3f} -> {last_loss:.4f} in {metrics_lines[-1]['step']} steps",
        last_loss < first_loss / 10,
    )

    num_skipped = sum(not line["updated"] for line in metrics_lines)
    num_dropped = 0
    for line in metrics_lines:
        num_dropped += sum(count for name, count in line.items() if name.startswith("dropped/"))
    demo.record_check(
        "No step was skipped, no sample was dropped",
        f"{num_skipped} skipped, {num_dropped} dropped",
        num_skipped + num_dropped == 0,
    )


def _check_repeated_losses(demo: DemoRun, metrics_lines: list[dict[str, Any]]) -> None:
    resume_line = _resume_lines(metrics_lines)[0]
    losses_before = {line["step"]: line["loss"] for line in metrics_lines[:resume_line]}
    losses_after = {line["step"]: line["loss"] for line in metrics_lines[resume_line:]}
    repeated_steps = sorted(losses_before.keys() & losses_after.keys())
    largest_difference = max(
        (abs(losses_before[step] - losses_after[step]) / losses_before[step] for step in repeated_steps),
        default=float("inf"),
    )
    first_step = min(losses_after)
    result_text = (
        f"resumed at step {first_step}; {len(repeated_steps)} "
        f"repeated steps differ by at most {largest_difference:.1e}"
    )
    demo.record_check(
        "A killed run resumes from its checkpoint and repeats its losses",
        result_text,
        first_step == demo.save_step + 1
        and largest_difference < (1e-6 if demo.machine.is_deterministic else 0.1),
    )


def export_weights(demo: DemoRun) -> dict[str, Any]:
    """Exports the final weights. Returns the trainer's metrics for them."""
    demo.run_command(
        "megatron-vl", "export", "--checkpoint", demo.run_dir, "--hf", demo.hf_dir, "--out", demo.exported_dir
    )
    exit_code = demo.run_command(
        "megatron-vl", "verify", demo.hf_dir, demo.exported_dir, "--show", "2", may_fail=True
    )
    demo.record_check(
        "verify sees that training changed the weights", f"exit code {exit_code}", exit_code == 1
    )
    return evaluate_weights(demo, demo.run_dir / f"step_{demo.num_steps:08d}" / "weights", "after")


def evaluate_weights(demo: DemoRun, weights_dir: Path, evaluation_name: str) -> dict[str, Any]:
    """Runs one step of the trainer at learning rate 0 over all conversations. Returns its metrics.

    Each conversation has its own row. One process loads the weights, whatever layout they were saved in.
    """
    evaluation_dir = demo.demo_dir / f"evaluation_{evaluation_name}"
    start_arguments = ("--model.checkpoint", weights_dir, "--checkpoint.dir", evaluation_dir, "--steps", "1")
    learning_rate_arguments = ("--optimizer.lr", "0", "--optimizer.warmup_steps", "0")
    row_count = str(len(_read_samples(demo)))
    row_arguments = ("--data.pack", "false", "--data.shuffle", "false", "--global_batch_size", row_count)
    layout_arguments = ("--parallel.tp", "1", "--parallel.pp", "1", "--parallel.layers", "null")
    unsplit_arguments = (*layout_arguments, "--parallel.sequence_parallel", "false")
    demo.run_command(
        *demo.train_command(
            *start_arguments, *learning_rate_arguments, *row_arguments, *unsplit_arguments, world_size=1
        )
    )
    return read_metrics(evaluation_dir)[-1]


def _open_reference(hf_dir: Path) -> DemoReference:
    return DemoReference(hf_dir, video_fps=VIDEO_FPS, video_max_frames=VIDEO_MAX_FRAMES)


def compare_losses(
    demo: DemoRun,
    reference: DemoReference,
    training_phase: str,
    trainer_metrics: dict[str, Any],
    tolerance: float,
) -> None:
    """Compares the loss of all conversations in transformers with the trainer's, both in float32.

    Args:
        training_phase: text for the table.
        trainer_metrics: the result of :func:`evaluate_weights`.
        tolerance: largest relative difference.
    """
    samples = _read_samples(demo)
    sample_losses = [reference.assistant_loss(sample, demo.raw_dir / "media") for sample in samples]
    token_count = sum(count for _, count in sample_losses)
    mean_loss = sum(total for total, _ in sample_losses) / token_count
    relative_error = abs(mean_loss - trainer_metrics["loss"]) / mean_loss
    demo.record_check(
        f"Loss {training_phase}: transformers' equals the trainer's",
        f"{mean_loss:.6f} and {trainer_metrics['loss']:.6f}, {relative_error:.1e} "
        f"apart; {token_count} and {trainer_metrics['loss_tokens']} tokens",
        relative_error < tolerance
        and token_count == trainer_metrics["loss_tokens"]
        and trainer_metrics["samples"] == len(samples),
    )


def compare_answers(demo: DemoRun, reference: DemoReference) -> None:
    """Compares the answers that the exported folder generates in transformers with those in the data."""
    answers_match = []
    for sample in _read_samples(demo):
        generated_answer = reference.greedy_answer(sample, demo.raw_dir / "media")
        expected_answer = sample["conversations"][1]["value"]
        answers_match.append(generated_answer == expected_answer)
        result_mark = "[green]as taught[/]" if answers_match[-1] else f"[red]taught: {expected_answer}[/]"
        demo.console.print(
            f"[bold]{sample['id']}[/]: {sample['conversations'][0]['value']!r} "
            f"-> {generated_answer!r} {result_mark}",
            soft_wrap=True,
        )

    num_pictures = len(demo_data.ANSWER_BY_PICTURE)
    right_pictures, right_others = sum(answers_match[:num_pictures]), sum(answers_match[num_pictures:])
    demo.record_check(
        "One question about five photographs: transformers generates the right answers",
        f"{right_pictures} of {num_pictures}",
        right_pictures == num_pictures,
    )
    num_others = len(answers_match) - num_pictures
    demo.record_check(
        "Several images, text only, video: answers as taught",
        f"{right_others} of {num_others}",
        right_others == num_others,
    )


def write_report(demo: DemoRun) -> int:
    """Shows the table and writes ``loss.png`` and ``report.json``. Returns the exit code."""
    draw_losses(demo, demo.demo_dir / "loss.png")
    failed_checks = [check for check in demo.checks if not check.passed]
    report_fields = {
        "passed": not failed_checks,
        "checks": [asdict(check) for check in demo.checks],
        "seconds": demo.seconds_by_part,
    }
    (demo.demo_dir / "report.json").write_text(json.dumps(report_fields, indent=2) + "\n")

    check_table = Table(
        "checked", "measured", "", title=f"Demo in {demo.demo_dir}, {demo.seconds_by_part['total']:.0f} s"
    )
    for check in demo.checks:
        check_table.add_row(
            check.what, check.measured, "[green]ok[/]" if check.passed else "[bold red]FAILED[/]"
        )
    demo.console.print(check_table)
    demo.console.print(f"loss curve: {demo.demo_dir / 'loss.png'}   trained checkpoint: {demo.exported_dir}")
    return 1 if failed_checks else 0


def draw_losses(demo: DemoRun, image_path: Path) -> None:
    """Draws the loss of each step. The runs before and after the kill have different colours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics_lines = read_metrics(demo.run_dir)
    machine = demo.machine
    run_starts = [0, *_resume_lines(metrics_lines), len(metrics_lines)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()

    for run_number, (run_start, run_end) in enumerate(zip(run_starts, run_starts[1:], strict=False)):
        run_lines = metrics_lines[run_start:run_end]
        plot_style: dict[str, Any] = {"label": "resumed", "marker": "."}
        if run_number == 0 and len(run_starts) > 2:
            # These points are rings, so that the repeated steps are visible on top of them.
            plot_style = {"label": "first run, killed", "marker": "o", "markersize": 9, "fillstyle": "none"}
        axes.semilogy(
            [line["step"] for line in run_lines], [line["loss"] for line in run_lines], **plot_style
        )

    axes.set(
        xlabel="step",
        ylabel="loss per token (nats)",
        title=f"Small Qwen2.5-VL, TP{machine.tp_size} x PP{machine.pp_size} on {machine.platform}",
    )
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(image_path, dpi=120)
