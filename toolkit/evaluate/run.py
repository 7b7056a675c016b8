"""One evaluation: hashes, gates, worker processes, scores."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from toolkit.cli import CommandError
from toolkit.evaluate import gates
from toolkit.evaluate.gates import Gate
from toolkit.evaluate.worker import QUESTIONS, UNUSABLE, read_answers
from toolkit.hf import check_folder

MARK = ".megatron-vl-evaluate"
PACKAGES = ("ms-vlmeval", "transformers", "torch")


class UsageError(Exception):
    """Arguments that cannot be used; exit code 2."""


@dataclass(frozen=True)
class Options:
    """What is evaluated, and how. Sizes of pictures in pixels; None: the checkpoint's own."""

    checkpoints: dict[str, Path]
    """Role (``original``, ``converted``, ``trained``) -> Hugging Face folder."""
    data: str
    lmu_data: Path
    out: Path
    limit: int | None = None
    judge: str = "exact_matching"
    dtype: str | None = None
    device: str | None = None
    processes: int | None = None
    gpus_per_process: int = 1
    min_pixels: int | None = None
    max_pixels: int | None = None
    largest_picture: int = 128_000_000
    max_new_tokens: int = 256
    logit_questions: int = 4
    keep_going: bool = False


@dataclass
class Result:
    """What was measured."""

    data: str
    questions: int
    settings: dict[str, Any]
    checkpoints: dict[str, dict[str, Any]]
    """Role -> folder, hash, metrics, problem."""
    gates: list[Gate] = field(default_factory=list)
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Role -> lines of :mod:`worker`."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def as_json(self) -> dict[str, Any]:
        """All but the answers."""
        rest = {name: value for name, value in asdict(self).items() if name != "answers"}
        return {"passed": self.passed} | rest


def evaluate(options: Options, show: Callable[[str], None]) -> Result:
    """Evaluates all checkpoints of ``options`` and judges the conversion.

    Raises:
        UsageError: a folder, table or number cannot be used.
        CommandError: a worker process failed; the message ends with the last lines of its log.
        ConfigError, WeightsError: a checkpoint cannot be used.
    """
    start = time.monotonic()
    settings = _settings(options)
    for folder in options.checkpoints.values():
        check_folder(folder)
    work = _prepare(options)
    checkpoints: dict[str, dict[str, Any]] = {}
    for role, folder in options.checkpoints.items():
        show(f"{role}: reading {folder}")
        checkpoints[role] = {"folder": str(folder), "sha256": folder_hash(folder), "metrics": {}, "problem": ""}
    result = Result(options.data, 0, settings, checkpoints)
    result.gates.append(gates.tensors(options.checkpoints["original"], options.checkpoints["converted"]))
    if result.passed or options.keep_going:
        names = {role: f"{role}-{facts['sha256'][:16]}" for role, facts in checkpoints.items()}
        _answer_and_score(options, settings, work, names, result, show)
    else:
        result.gates += [Gate(name, None, "not run: an earlier gate failed; --keep-going runs it") for name in gates.ORDER[1:]]
    result.seconds = round(time.monotonic() - start, 1)
    return result


def _answer_and_score(
    options: Options, settings: dict[str, Any], work: Path, names: dict[str, str], result: Result, show: Callable[[str], None]
) -> None:
    job = {
        "data": options.data,
        "root": str(options.lmu_data.resolve()),
        "work": str(work),
        "checkpoints": {names[role]: str(folder.resolve()) for role, folder in options.checkpoints.items()},
        "settings": settings,
        "limit": options.limit,
        "judge": options.judge,
        "processes": settings["processes"],
        "logit_questions": options.logit_questions,
    }
    for name in names.values():
        (work / name).mkdir()
    (work / "job.json").write_text(json.dumps(job, indent=1))
    _run_workers(options, work, list(range(settings["processes"])), show, names)
    if settings["processes"] > 1:
        _run_workers(options, work, ["score"], show, names)
    result.answers = {role: read_answers(work / name) for role, name in names.items()}
    result.questions = int((work / QUESTIONS).read_text())
    for role, name in names.items():
        facts = result.checkpoints[role]
        facts["metrics"], facts["problem"] = read_scores(work / name, options.data)
    original, converted = work / names["original"], work / names["converted"]
    result.gates += [
        gates.logits(original, converted),
        gates.text(result.answers["original"], result.answers["converted"], result.questions),
        gates.scores(
            {role: facts["metrics"] for role, facts in result.checkpoints.items()},
            {role: facts["problem"] for role, facts in result.checkpoints.items() if facts["problem"]},
        ),
    ]


def read_scores(work: Path, data: str) -> tuple[dict[str, float], str]:
    """The metrics that VLMEvalKit wrote for a checkpoint (empty when it has none), and what it says instead."""
    path = work / "status.json"
    if not path.is_file():
        return {}, "VLMEvalKit wrote no status.json"
    status = json.loads(path.read_text()).get("datasets", {}).get(data, {})
    found = {name: value for name, value in status.get("metrics", {}).items() if isinstance(value, (int, float))}
    reason = status.get("error_message") or status.get("skip_reason") or ""
    return ({}, reason) if reason else (found, "" if found else f"VLMEvalKit stopped at {status.get('status')!r}")


def folder_hash(folder: Path) -> str:
    """SHA-256 of all that decides what a checkpoint answers: its weights and every file beside them, by name."""
    tensors = check_folder(folder)
    state = hashlib.sha256()
    for name in sorted([*tensors.files, *map(str, tensors.companions()[0])]):
        with (folder / name).open("rb") as file:
            state.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return state.hexdigest()


def _settings(options: Options) -> dict[str, Any]:
    """What all checkpoints are run with, chosen where it was not given. Raises UsageError."""
    import torch

    for package in PACKAGES:
        try:
            version(package)
        except PackageNotFoundError as error:
            raise UsageError(f"{package} is missing; install it: pip install -e '.[eval]' -c constraints.txt") from error
    if not (options.lmu_data / f"{options.data}.tsv").is_file() or "/" in options.data:
        raise UsageError(
            f"--data {options.data}: {options.lmu_data / options.data}.tsv does not exist; put the table of that name there "
            "(nothing is downloaded), or give its folder as --lmu-data"
        )
    counts = ("limit", "processes", "gpus_per_process", "min_pixels", "max_pixels", "max_new_tokens", "logit_questions")
    for name in counts:
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    gpus = torch.cuda.device_count()
    device = options.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and gpus < options.gpus_per_process:
        raise UsageError(f"--gpus-per-process {options.gpus_per_process}, but this machine has {gpus} GPUs")
    processes = options.processes or (gpus // options.gpus_per_process if device == "cuda" else 1)
    if device == "cuda" and processes * options.gpus_per_process > gpus:
        raise UsageError(f"--processes {processes} of {options.gpus_per_process} GPUs each: this machine has {gpus} GPUs")
    return {
        "dtype": options.dtype or _own_dtype(options.checkpoints["original"]),
        "device": "auto" if device == "cuda" and options.gpus_per_process > 1 else device,
        "processes": processes,
        "gpus_per_process": options.gpus_per_process if device == "cuda" else 0,
        "min_pixels": options.min_pixels,
        "max_pixels": options.max_pixels,
        "largest_picture": options.largest_picture,
        "max_new_tokens": options.max_new_tokens,
        "judge": options.judge,
        "versions": {package: version(package) for package in PACKAGES} | {"python": platform.python_version()},
    }


def _own_dtype(folder: Path) -> str:
    """The type that most weights of a folder have, in torch's name."""
    from megatron_vl.tensor_files import DTYPES, dtype_name

    tensors = check_folder(folder)
    codes = [tensors.code(name) for name in tensors.where]
    return dtype_name(DTYPES.get(max(set(codes), key=codes.count), next(iter(DTYPES.values()))))


def _prepare(options: Options) -> Path:
    """A fresh work folder in ``--out`` with a copy of the table. Raises UsageError when ``--out`` holds something else."""
    out = options.out
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARK).exists())):
        raise UsageError(f"--out {out} is not empty and not of an earlier evaluation; give another folder")
    work = (out / "work").resolve()
    # Answers of an earlier evaluation would be taken for this one's.
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (out / MARK).touch()
    # A copy: VLMEvalKit writes over a table whose checksum it does not know, and beside it.
    shutil.copyfile(options.lmu_data / f"{options.data}.tsv", work / f"{options.data}.tsv")
    return work


def _run_workers(options: Options, work: Path, parts: list[Any], show: Callable[[str], None], names: dict[str, str]) -> None:
    """Runs one process a part to its end. Raises CommandError when one of them fails, UsageError about the table."""
    running = []
    try:
        for part in parts:
            log = (work / f"worker_{part}.log").open("wb")
            command = [sys.executable, "-m", "toolkit.evaluate.worker", str(work / "job.json"), str(part)]
            environment = _environment(options, work, part)
            root = options.lmu_data.resolve()  # tables may name pictures relative to it
            running.append((part, subprocess.Popen(command, env=environment, cwd=root, stdout=log, stderr=subprocess.STDOUT)))
            log.close()
        progress = _Progress(work, names, show)
        while any(process.poll() is None for _, process in running) and not any(process.poll() for _, process in running):
            time.sleep(0.2)
            progress.look()
        for part, process in running:
            if process.poll():
                lines = (work / f"worker_{part}.log").read_text(errors="replace").strip().splitlines()[-12:]
                if process.returncode == UNUSABLE:
                    raise UsageError(lines[-1])
                raise CommandError(f"worker {part} failed with exit code {process.returncode}:\n" + "\n".join(lines))
    finally:
        for _, process in running:
            if process.poll() is None:
                process.kill()
            process.wait()


def _environment(options: Options, work: Path, part: Any) -> dict[str, str]:
    """Nothing of a torchrun around this command, no network, and a folder of data sets with one table in it."""
    data = work / f"data_{part}"
    data.mkdir(exist_ok=True)
    table = data / f"{options.data}.tsv"
    if not table.exists():
        table.symlink_to(work / table.name)
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MMEVAL_ROOT", "PRED_FORMAT", "EVAL_FORMAT", "SKIP_ERR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    repository = str(Path(__file__).resolve().parents[2])
    environment |= {"LMUData": str(data), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"PYTHONPATH": os.pathsep.join([repository, *filter(None, [os.environ.get("PYTHONPATH")])])}
    if options.device != "cpu" and part != "score" and (visible := _gpus(options.gpus_per_process, int(part))):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    return environment


def _gpus(each: int, rank: int) -> list[str]:
    """The GPUs of one process, in the names of this process' CUDA_VISIBLE_DEVICES."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    return names[rank * each : (rank + 1) * each]


class _Progress:
    """Answers so far, their rate and the time left, from the files that workers write."""

    def __init__(self, work: Path, names: dict[str, str], show: Callable[[str], None]) -> None:
        self.work, self.names, self.show = work, names, show
        self.first: tuple[float, int] | None = None
        self.judging = False
        self.shown = time.monotonic()
        self.every = 2.0 if sys.stderr.isatty() else 15.0

    def look(self) -> None:
        now = time.monotonic()
        if now - self.shown < self.every:
            return
        self.shown = now
        files = {role: (self.work / name).glob("answers_*.jsonl") for role, name in self.names.items()}
        counts = {role: sum(map(_lines, some)) for role, some in files.items()}
        done = sum(counts.values())
        questions = (self.work / QUESTIONS).read_text() if (self.work / QUESTIONS).is_file() else ""
        if not done or not questions:
            return
        total = len(self.names) * int(questions)
        if done == total:
            if not self.judging:
                self.show(f"all {total} questions are answered; VLMEvalKit judges")
            self.judging = True
            return
        listed = ", ".join(f"{role} {count}" for role, count in counts.items())
        if self.first is None:  # loading the model is not part of the rate
            self.first = (now, done)
        rate = (done - self.first[1]) / (now - self.first[0]) if now > self.first[0] else 0.0
        left = f"; {rate:.1f}/s, {(total - done) / rate:.0f} s left" if rate else ""
        self.show(f"answers of {total}: {listed}{left}")


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)
