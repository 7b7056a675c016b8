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
from toolkit.demo import data
from toolkit.demo.reference import DemoReference
from toolkit.processes import kill_tree
from toolkit.tiny import TinySizes, write_tiny_checkpoint

SIZES = TinySizes(
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
class Machine:
    """The machine that the demo runs on, and the layout of the model."""

    platform: str = "cpu"
    ranks: int = 4
    tp: int = 2
    pp: int = 2

    @property
    def dtype(self) -> str:
        return "float32" if self.platform == "cpu" else "bfloat16"

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers of each stage. The first stage also holds the vision tower, so it gets fewer."""
        even = SIZES.layers // self.pp
        return (
            (SIZES.layers,)
            if self.pp == 1
            else (even - 1, *[even] * (self.pp - 2), SIZES.layers - (even - 1) - even * (self.pp - 2))
        )

    @property
    def exact(self) -> bool:
        """Whether results are the same bits in every run.

        This holds for float32 on CPU, but not for bf16 on GPUs, where attention's backward pass sums in any
        order.
        """
        return self.platform == "cpu"


@dataclass
class Check:
    """One line of the final table."""

    what: str
    measured: str
    passed: bool


@dataclass
class Demo:
    """A demo in ``folder``: its paths, its checks, and the seconds of each part."""

    folder: Path
    steps: int
    machine: Machine = field(default_factory=Machine)
    raw_data: Path | None = None
    """Raw data of an earlier demo to use; None: new data are made."""
    console: Console = field(
        default_factory=lambda: Console(highlight=False, width=max(110, Console().width))
    )
    checks: list[Check] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hf = self.folder / "hf"
        self.raw = self.folder / "raw"
        self.dataset = self.folder / "dataset"
        self.run_yaml = self.folder / "run.yaml"
        self.run_dir = self.folder / "run"
        self.exported = self.folder / "hf_trained"
        self.save_at = max(1, self.steps // 3)

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Prints a heading and times the part."""
        self.console.rule(f"[bold]{len(self.seconds) + 1}. {title}", align="left")
        start = time.perf_counter()
        yield
        self.seconds[title] = round(time.perf_counter() - start, 1)

    def record(self, what: str, measured: str, passed: bool) -> None:
        self.checks.append(Check(what, measured, passed))

    def shell(self, *command: str | Path, fails: bool = False) -> int:
        """Shows a command and runs it. Returns its exit code.

        Raises:
            UserError: the command fails, and ``fails`` does not allow that.
        """
        process = self.start(*command)
        code = process.wait()
        if code and not fails:
            raise UserError(f"the command above ended with exit code {code}; its output says why")
        return code

    def start(self, *command: str | Path, stderr: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        """Shows a command and starts it with the programs of this Python's environment, activated or not."""
        words = [str(word) for word in command]
        self.console.print(f"[bold green]$[/] {shlex.join(words)}", soft_wrap=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return subprocess.Popen([sys.executable, "-m", "toolkit", *words[1:]], env=environment, stderr=stderr)

    def train(self, *options: str | Path, ranks: int | None = None) -> tuple[str | Path, ...]:
        """The trainer's command line for this demo's group of processes, or for ``ranks`` processes."""
        processes = str(ranks or self.machine.ranks)
        return ("megatron-vl", "train", "--nproc-per-node", processes, "--config", self.run_yaml, *options)


def run_demo(folder: Path, steps: int, machine: Machine | None = None, raw_data: Path | None = None) -> int:
    """Empties ``folder`` and runs all steps in it. Returns exit code 1 if a check failed."""
    machine = machine or Machine()
    demo = Demo(folder, steps, machine, raw_data)
    _clear(folder)
    start = time.perf_counter()
    with demo.part("A small Qwen2.5-VL checkpoint, and conversations about real photographs"):
        prepare(demo)
    with demo.part("Conversations to WebDataset shards for Energon"):
        source = ("--input", demo.raw / "conversations.json", "--media-root", demo.raw / "media")
        demo.shell("megatron-vl", "data", "convert", *source, "--out", demo.dataset, "--val-fraction", "0")

    with demo.part(f"Weights: Hugging Face -> Megatron -> TP{machine.tp} x PP{machine.pp} shards, and back"):
        round_trip(demo)
    with demo.part("The trainer's loss before training, in one process"):
        before = evaluate(demo, demo.folder / "shards", "before")
    with demo.part(f"Training in {machine.ranks} processes, killed on the way"):
        train_until_killed(demo)
    with demo.part("The same command again resumes"):
        demo.shell(*demo.train())
        check_training(demo)

    with demo.part("Export, and the trainer's loss of the final weights in one process"):
        after = export(demo)
    with demo.part("Both folders in transformers"):
        compare_losses(demo, _reference(demo.hf), "before training", before, 1e-5 if machine.exact else 1e-2)
        trained = _reference(demo.exported)
        # Relative to a loss near zero, rounding errors are larger.
        compare_losses(demo, trained, "after", after, 1e-4 if machine.exact else 0.1)
        compare_answers(demo, trained)

    demo.seconds["total"] = round(time.perf_counter() - start, 1)
    return report(demo)


def _clear(folder: Path) -> None:
    """Empties the folder of an earlier demo. Refuses any other folder that is not empty."""
    mark = folder / ".megatron-vl-demo"
    if folder.exists() and any(folder.iterdir()) and not mark.exists():
        raise UserError(f"{folder} is not empty and was not written by an earlier demo; give another --dir")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark.touch()


def prepare(demo: Demo) -> None:
    """Writes the checkpoint, the raw data and the run's YAML."""
    write_tiny_checkpoint(demo.hf, "qwen2_5_vl", texts=data.texts(), dtype=torch.float32, sizes=SIZES)
    if demo.raw_data:
        shutil.copytree(demo.raw_data, demo.raw)
        conversations = demo.raw / "conversations.json"
    else:
        conversations = data.write_raw_data(demo.raw)

    settings = {
        "model": {"hf": str(demo.hf), "checkpoint": str(demo.folder / "shards")},
        "parallel": {
            "tp": demo.machine.tp,
            "pp": demo.machine.pp,
            "layers": list(demo.machine.layers),
            "sequence_parallel": demo.machine.tp > 1,
        },
        "data": {
            "path": str(demo.dataset),
            "seq_len": 512,
            "num_workers": 1,
            "video_fps": VIDEO_FPS,
            "video_max_frames": VIDEO_MAX_FRAMES,
        },
        "optimizer": {
            "lr": 2e-3,
            "warmup_steps": min(10, demo.steps // 4),
            "schedule": "cosine",
            "weight_decay": 0.01,
        },
        "checkpoint": {"dir": str(demo.run_dir), "interval": demo.save_at},
        "steps": demo.steps,
        "global_batch_size": 4,
        "dtype": demo.machine.dtype,
        "platform": demo.machine.platform,
    }

    demo.run_yaml.write_text(yaml.safe_dump(settings, sort_keys=False))
    parameters = sum(torch.Size(shape).numel() for shape in _shapes(demo.hf))
    demo.console.print(
        f"{demo.hf}: {parameters / 1e6:.2f} M parameters, random; {conversations}: {len(_samples(demo))} "
        "conversations"
    )
    demo.console.print(f"{demo.run_yaml}: the configuration of the training below")


def _shapes(hf: Path) -> Iterator[list[int]]:
    from safetensors import safe_open

    for file in sorted(hf.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield tensors.get_slice(name).get_shape()


def _samples(demo: Demo) -> list[dict[str, Any]]:
    return json.loads((demo.raw / "conversations.json").read_text())


def round_trip(demo: Demo) -> None:
    """Converts Hugging Face -> unsplit -> shards -> Hugging Face, and compares the folders bit for bit."""
    full = demo.folder / "full"
    shards = demo.folder / "shards"
    again = demo.folder / "hf_again"
    tp = demo.machine.tp
    pp = demo.machine.pp
    layers = ",".join(map(str, demo.machine.layers))

    demo.shell("megatron-vl", "convert", "--hf", demo.hf, "--out", full)
    sizes = ("--tp", str(tp), "--pp", str(pp), "--layers", layers)
    demo.shell("megatron-vl", "split", "--checkpoint", full, *sizes, "--out", shards)
    demo.shell("megatron-vl", "export", "--checkpoint", shards, "--hf", demo.hf, "--out", again)

    code = demo.shell("megatron-vl", "verify", demo.hf, again, fails=True)
    count = sum(1 for _ in _shapes(demo.hf))
    measured = f"{count} tensors identical" if code == 0 else "tensors differ, see above"
    demo.record(
        f"Hugging Face -> TP{tp} x PP{pp} (layers {layers}) -> Hugging Face returns every bit",
        measured,
        code == 0,
    )


def train_until_killed(demo: Demo) -> None:
    """Starts the training and kills all its processes (SIGKILL) a few steps after its first checkpoint."""
    log = demo.folder / "killed.log"
    with log.open("wb") as stderr:
        process = demo.start(*demo.train(), stderr=stderr)
        goal = min(demo.save_at + 3, demo.steps - 1)
        saved = demo.run_dir / f"step_{demo.save_at:08d}"  # written in the background
        while process.poll() is None and not (
            saved.is_dir() and any(m["step"] >= goal for m in read_metrics(demo.run_dir))
        ):
            time.sleep(0.2)

        if process.poll() is not None:
            raise UserError(
                f"the training ended with exit code {process.returncode} before it was killed; {log} says why"
            )
        kill_tree(process.pid)
        process.wait()

    last = read_metrics(demo.run_dir)[-1]["step"]
    demo.console.print(
        f"(killed after step {last}, see {log}; the last checkpoint is from step {demo.save_at})"
    )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Reads the lines of a run's ``metrics.jsonl``, except an incomplete last line."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def check_training(demo: Demo) -> None:
    """Checks that the steps repeated after the kill have the same losses, and that the loss has fallen."""
    lines = read_metrics(demo.run_dir)
    cut = next(i for i in range(1, len(lines)) if lines[i]["step"] <= lines[i - 1]["step"])
    before = {line["step"]: line["loss"] for line in lines[:cut]}
    after = {line["step"]: line["loss"] for line in lines[cut:]}
    repeated = sorted(before.keys() & after.keys())
    worst = max((abs(before[s] - after[s]) / before[s] for s in repeated), default=float("inf"))
    first = min(after)
    measured = f"resumed at step {first}; {len(repeated)} repeated steps differ by at most {worst:.1e}"
    demo.record(
        "A killed run resumes from its checkpoint and repeats its losses",
        measured,
        first == demo.save_at + 1 and worst < (1e-6 if demo.machine.exact else 0.1),
    )

    start = before[1]
    end = sum(line["loss"] for line in lines[-5:]) / 5
    demo.record(
        "The loss has fallen to less than a tenth",
        f"{start:.3f} -> {end:.4f} in {lines[-1]['step']} steps",
        end < start / 10,
    )

    skipped = sum(not line["updated"] for line in lines)
    dropped = 0
    for line in lines:
        dropped += sum(n for name, n in line.items() if name.startswith("dropped/"))
    demo.record(
        "No step was skipped, no sample was dropped",
        f"{skipped} skipped, {dropped} dropped",
        skipped + dropped == 0,
    )


def export(demo: Demo) -> dict[str, Any]:
    """Exports the final weights. Returns the trainer's metrics for them."""
    demo.shell("megatron-vl", "export", "--checkpoint", demo.run_dir, "--hf", demo.hf, "--out", demo.exported)
    untouched = demo.shell("megatron-vl", "verify", demo.hf, demo.exported, "--show", "2", fails=True)
    demo.record("verify sees that training changed the weights", f"exit code {untouched}", untouched == 1)
    return evaluate(demo, demo.run_dir / f"step_{demo.steps:08d}" / "weights", "after")


def evaluate(demo: Demo, weights: Path, name: str) -> dict[str, Any]:
    """Runs one step of the trainer at learning rate 0 over all conversations. Returns its metrics.

    Each conversation has its own row. One process loads the weights, whatever layout they were saved in.
    """
    folder = demo.folder / f"evaluation_{name}"
    start = ("--model.checkpoint", weights, "--checkpoint.dir", folder, "--steps", "1")
    still = ("--optimizer.lr", "0", "--optimizer.warmup_steps", "0")
    count = str(len(_samples(demo)))
    rows = ("--data.pack", "false", "--data.shuffle", "false", "--global_batch_size", count)
    alone = ("--parallel.tp", "1", "--parallel.pp", "1", "--parallel.layers", "null")
    unsplit = (*alone, "--parallel.sequence_parallel", "false")
    demo.shell(*demo.train(*start, *still, *rows, *unsplit, ranks=1))
    return read_metrics(folder)[-1]


def _reference(hf: Path) -> DemoReference:
    return DemoReference(hf, video_fps=VIDEO_FPS, video_max_frames=VIDEO_MAX_FRAMES)


def compare_losses(
    demo: Demo, reference: DemoReference, when: str, evaluated: dict[str, Any], tolerance: float
) -> None:
    """Compares the loss of all conversations in transformers with the trainer's, both in float32.

    Args:
        when: text for the table.
        evaluated: the result of :func:`evaluate`.
        tolerance: largest relative difference.
    """
    samples = _samples(demo)
    losses = [reference.loss(sample, demo.raw / "media") for sample in samples]
    tokens = sum(count for _, count in losses)
    loss = sum(total for total, _ in losses) / tokens
    error = abs(loss - evaluated["loss"]) / loss
    demo.record(
        f"Loss {when}: transformers' equals the trainer's",
        f"{loss:.6f} and {evaluated['loss']:.6f}, {error:.1e} apart; {tokens} and {evaluated['loss_tokens']} "
        "tokens",
        error < tolerance and tokens == evaluated["loss_tokens"] and evaluated["samples"] == len(samples),
    )


def compare_answers(demo: Demo, reference: DemoReference) -> None:
    """Compares the answers that the exported folder generates in transformers with those in the data."""
    right = []
    for sample in _samples(demo):
        answer = reference.answer(sample, demo.raw / "media")
        wanted = sample["conversations"][1]["value"]
        right.append(answer == wanted)
        mark = "[green]as taught[/]" if right[-1] else f"[red]taught: {wanted}[/]"
        demo.console.print(
            f"[bold]{sample['id']}[/]: {sample['conversations'][0]['value']!r} -> {answer!r} {mark}",
            soft_wrap=True,
        )

    count = len(data.PICTURES)
    seen, others = sum(right[:count]), sum(right[count:])
    demo.record(
        "One question about five photographs: transformers generates the right answers",
        f"{seen} of {count}",
        seen == count,
    )
    left = len(right) - count
    demo.record("Several images, text only, video: answers as taught", f"{others} of {left}", others == left)


def report(demo: Demo) -> int:
    """Shows the table and writes ``loss.png`` and ``report.json``. Returns the exit code."""
    draw_losses(demo, demo.folder / "loss.png")
    failed = [check for check in demo.checks if not check.passed]
    summary = {
        "passed": not failed,
        "checks": [asdict(check) for check in demo.checks],
        "seconds": demo.seconds,
    }
    (demo.folder / "report.json").write_text(json.dumps(summary, indent=2) + "\n")

    table = Table("checked", "measured", "", title=f"Demo in {demo.folder}, {demo.seconds['total']:.0f} s")
    for check in demo.checks:
        table.add_row(check.what, check.measured, "[green]ok[/]" if check.passed else "[bold red]FAILED[/]")
    demo.console.print(table)
    demo.console.print(f"loss curve: {demo.folder / 'loss.png'}   trained checkpoint: {demo.exported}")
    return 1 if failed else 0


def draw_losses(demo: Demo, path: Path) -> None:
    """Draws the loss of each step; the runs before and after the kill have different colours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(demo.run_dir)
    machine = demo.machine
    starts = (
        [0] + [i for i in range(1, len(lines)) if lines[i]["step"] <= lines[i - 1]["step"]] + [len(lines)]
    )
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()

    for number, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        part = lines[begin:end]
        style: dict[str, Any] = {"label": "resumed", "marker": "."}
        if number == 0 and len(starts) > 2:
            # These points are rings, so that the repeated steps are visible on top of them.
            style = {"label": "first run, killed", "marker": "o", "markersize": 9, "fillstyle": "none"}
        axes.semilogy([line["step"] for line in part], [line["loss"] for line in part], **style)

    axes.set(
        xlabel="step",
        ylabel="loss per token (nats)",
        title=f"Small Qwen2.5-VL, TP{machine.tp} x PP{machine.pp} on {machine.platform}",
    )
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
