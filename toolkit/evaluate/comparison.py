"""Runs one evaluation: hashes, gates, worker processes, scores."""

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
from urllib.parse import urlsplit

from megatron_vl.data.chat import read_chat_template
from megatron_vl.data.thinking import switches_thinking
from megatron_vl.errors import UsageError, UserError
from megatron_vl.spec.families import read_spec
from megatron_vl.weights.video_rule import exported_video_rule
from toolkit.evaluate import cage, gates
from toolkit.evaluate.early import copy_tables
from toolkit.evaluate.gates import Gate
from toolkit.evaluate.vlmevalkit import NO_JUDGE, RELIED_ON
from toolkit.evaluate.worker import JUDGED, QUESTIONS, TABLES, UNUSABLE, read_answers
from toolkit.hf import check_folder
from toolkit.trained_rules import follow

MARK = ".megatron-vl-evaluate"
VLMEVALKIT = "0.0.20"
PACKAGES = ("ms-vlmeval", "transformers", "torch")
CLOSED = "confined: it writes only in the work folder,"
ANSWER, THOUGHT = 256, 32768
"""Default largest number of tokens of an answer, without and with thinking."""
HERE = ("localhost", "127.0.0.1", "::1")
"""Host names of this machine."""
NEEDS_JUDGE = (
    "a language model scores this data set: run one on this machine and give --judge NAME --judge-base-url "
    "http://localhost:PORT/v1, or skip the scores with --no-scores"
)


@dataclass(frozen=True)
class EvaluationOptions:
    """What is evaluated, and how. Sizes of pictures are in pixels; None means the checkpoint's own."""

    checkpoints: dict[str, Path]
    """Role (``original``, ``converted``, ``trained``) -> Hugging Face folder."""
    data: str
    lmu_data: Path
    out: Path
    limit: int | None = None
    judge: str = NO_JUDGE
    judge_url: str | None = None
    """Address of a judge on this machine, up to ``/v1``; without it only ``exact_matching`` judges."""
    scores: bool = True
    dtype: str | None = None
    device: str | None = None
    processes: int | None = None
    gpus_per_process: int = 1
    min_pixels: int | None = None
    max_pixels: int | None = None
    video_fps: float | None = None
    """Frames per second for videos of data sets whose name does not give a number of frames."""
    video_max_frames: int | None = None
    video_rules: dict[str, str] = field(default_factory=dict)
    """Rules for videos that were asked for: ``data.video_positions`` and ``data.video_prompt`` of a run."""
    largest_picture: int = 128_000_000
    max_new_tokens: int | None = None
    """None: ``ANSWER``, or ``THOUGHT`` if the model thinks."""
    thinking: str | None = None
    """``on``, ``off`` or None, which leaves it to the chat template."""
    logit_questions: int = 4
    keep_going: bool = False


@dataclass
class Result:
    """The results of an evaluation."""

    data: str
    questions: int
    settings: dict[str, Any]
    checkpoints: dict[str, dict[str, Any]]
    """Role -> folder, hash, metrics, problem, and the number of questions (of turns in dialogues) that were
    not answered because the model was still thinking."""
    gates: list[Gate] = field(default_factory=list)
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Role -> the lines that :mod:`worker` wrote."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(gate.passed is not False for gate in self.gates)

    def as_json(self) -> dict[str, Any]:
        """Everything except the answers."""
        rest = {name: value for name, value in asdict(self).items() if name != "answers"}
        return {"passed": self.passed} | rest


def evaluate(options: EvaluationOptions, show: Callable[[str], None]) -> Result:
    """Evaluates all checkpoints of ``options`` and judges the conversion. The data set must
    have passed :func:`early.check_data`.

    Raises:
        UsageError: a folder, table or number is invalid.
        UserError: a worker process failed; the message ends with the last lines of its log.
        ConfigError, WeightsError: a checkpoint is invalid.
    """
    start = time.monotonic()
    _check_out(options.out)
    for folder in options.checkpoints.values():
        check_folder(folder)
        if options.thinking and not switches_thinking(read_chat_template(folder)):
            raise UsageError(
                f"--thinking {options.thinking}: the chat template of {folder} has no switch for it"
                " (enable_thinking); leave out --thinking"
            )
    settings = _settings(options)
    settings["video_rules"] = video_rules(options, show)
    work = _prepare(options)
    settings["isolation"] = _isolation(work, bool(options.judge_url))
    show(f"VLMEvalKit runs {settings['isolation']}")

    with _Workers(options, settings, work) as workers:
        show(
            f"importing VLMEvalKit, which reads {options.data}: this takes up to half a minute; "
            "meanwhile the checkpoints are read"
        )
        workers.start(settings["processes"])
        checkpoints: dict[str, dict[str, Any]] = {}

        for role, folder in options.checkpoints.items():
            show(f"{role}: reading {folder}")
            checkpoints[role] = {
                "folder": str(folder),
                "sha256": folder_hash(folder),
                "metrics": {},
                "problem": "",
                "unanswered": 0,
            }
            workers.check()

        result = Result(options.data, 0, settings, checkpoints)
        result.gates.append(gates.tensors(options.checkpoints["original"], options.checkpoints["converted"]))
        if result.passed or options.keep_going:
            names = {role: f"{role}-{facts['sha256'][:16]}" for role, facts in checkpoints.items()}
            _answer_and_score(options, workers, names, result, show)
        else:
            why = "not run: an earlier gate failed; --keep-going runs it"
            result.gates += [Gate(name, None, why) for name in gates.ORDER[1:]]

    result.seconds = round(time.monotonic() - start, 1)
    return result


def _answer_and_score(
    options: EvaluationOptions,
    workers: _Workers,
    names: dict[str, str],
    result: Result,
    show: Callable[[str], None],
) -> None:
    work = workers.work
    for name in names.values():
        (work / name).mkdir()
    folders = {names[role]: str(folder.resolve()) for role, folder in options.checkpoints.items()}
    workers.go(folders)
    workers.wait(_Progress(work, names, show))

    result.answers = {role: read_answers(work / name) for role, name in names.items()}
    result.questions = int((work / QUESTIONS).read_text())
    for role, lines in result.answers.items():
        result.checkpoints[role]["unanswered"] = sum(line["unanswered"] for line in lines)
    result.settings["tables"] = json.loads((work / TABLES).read_text())

    original, converted = work / names["original"], work / names["converted"]
    result.gates += [
        gates.logits(original, converted),
        gates.text(result.answers["original"], result.answers["converted"], result.questions),
        _scores(options, work, names, result)
        if options.scores
        else Gate("scores", None, "not asked for: --no-scores"),
    ]


def _scores(options: EvaluationOptions, work: Path, names: dict[str, str], result: Result) -> Gate:
    judged = (work / JUDGED).read_text().splitlines() if (work / JUDGED).exists() else []
    for role, name in names.items():
        facts = result.checkpoints[role]
        facts["metrics"], facts["problem"] = read_scores(work / name, options.data)
        # Other data sets match answers instead of a judge, give up, or count unjudged answers as zero.
        if RELIED_ON in judged or (judged and not facts["metrics"]):
            said = facts["problem"].splitlines()[:1] or ["scores without it"]
            facts["metrics"] = {}
            facts["problem"] = f"{NEEDS_JUDGE} (VLMEvalKit: {said[0]})"
    return gates.scores(
        {role: facts["metrics"] for role, facts in result.checkpoints.items()},
        {role: facts["problem"] for role, facts in result.checkpoints.items() if facts["problem"]},
    )


def read_scores(work: Path, data: str) -> tuple[dict[str, float], str]:
    """The metrics that VLMEvalKit wrote for a checkpoint, and its message if it wrote none."""
    path = work / "status.json"
    if not path.is_file():
        return {}, "VLMEvalKit wrote no status.json"

    status = json.loads(path.read_text()).get("datasets", {}).get(data, {})
    numbers = {
        name: value for name, value in status.get("metrics", {}).items() if isinstance(value, (int, float))
    }
    # A metric is NaN if no question of its kind was asked.
    found = {name: value for name, value in numbers.items() if value == value}
    reason = status.get("error_message") or status.get("skip_reason") or ""
    return (
        ({}, reason)
        if reason
        else (found, "" if found else f"VLMEvalKit stopped at {status.get('status')!r}")
    )


def folder_hash(folder: Path) -> str:
    """SHA-256 of everything that determines a checkpoint's answers: its weights and all other
    files, by name."""
    tensors = check_folder(folder)
    state = hashlib.sha256()
    for name in sorted([*tensors.files, *map(str, tensors.companions()[0])]):
        with (folder / name).open("rb") as file:
            state.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return state.hexdigest()


def _settings(options: EvaluationOptions) -> dict[str, Any]:
    """The settings of all checkpoints; chooses those that were not given. Raises UsageError."""
    import torch

    if options.judge_url and urlsplit(options.judge_url).hostname not in HERE:
        raise UsageError(
            f"--judge-base-url {options.judge_url}: the judge must be on this machine ({', '.join(HERE)})"
        )
    if bool(options.judge_url) != (options.judge != NO_JUDGE):
        raise UsageError(
            "--judge and --judge-base-url must be given together; without a server only exact_matching judges"
        )

    counts = "limit processes gpus_per_process min_pixels max_pixels max_new_tokens logit_questions "
    counts += "video_max_frames"
    for name in counts.split():
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")

    if options.video_fps is not None and not options.video_fps > 0:
        raise UsageError(f"--video-fps {options.video_fps} must be above 0")
    gpus = torch.cuda.device_count()
    device = options.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and gpus < options.gpus_per_process:
        raise UsageError(f"--gpus-per-process {options.gpus_per_process}, but this machine has {gpus} GPUs")

    processes = options.processes or (gpus // options.gpus_per_process if device == "cuda" else 1)
    if device == "cuda" and processes * options.gpus_per_process > gpus:
        raise UsageError(
            f"--processes {processes} of {options.gpus_per_process} GPUs each: this machine has {gpus} GPUs"
        )

    check_vlmevalkit()
    return {
        "dtype": options.dtype or _own_dtype(options.checkpoints["original"]),
        "device": "auto" if device == "cuda" and options.gpus_per_process > 1 else device,
        "processes": processes,
        "gpus_per_process": options.gpus_per_process if device == "cuda" else 0,
        "min_pixels": options.min_pixels,
        "max_pixels": options.max_pixels,
        "largest_picture": options.largest_picture,
        "video_fps": options.video_fps,
        "video_max_frames": options.video_max_frames,
        "thinking": options.thinking,
        "max_new_tokens": options.max_new_tokens or ANSWER,
        "max_new_tokens_thinking": options.max_new_tokens or THOUGHT,
        "judge": options.judge,
        "versions": {package: version(package) for package in PACKAGES}
        | {"python": platform.python_version()},
    }


def check_vlmevalkit() -> None:
    """Raises UsageError if VLMEvalKit is missing or has another version."""
    try:
        installed = version("ms-vlmeval")
    except PackageNotFoundError:
        installed = ""
    if installed != VLMEVALKIT:
        state = f"is installed as version {installed}" if installed else "is missing"
        raise UsageError(
            f"VLMEvalKit {state}; version {VLMEVALKIT} is needed, so install the eval extra:"
            " pip install 'megatron-vl[eval]'"
        )


def video_rules(options: EvaluationOptions, show: Callable[[str], None]) -> dict[str, dict[str, str]]:
    """The rules for videos that each folder follows: its own where ``megatron_vl.json`` names one, and those
    asked for.

    The original and the converted checkpoint are one model: a rule that one of them names holds for both.

    Returns:
        Resolved folder -> fields of ``DataConfig``.

    Raises:
        UsageError: the original and the converted checkpoint name different rules, or one was asked for that
            contradicts a folder's.
        UserError: a folder names a rule that this version does not know.
    """
    own = {
        role: exported_video_rule(folder, read_spec(folder)) for role, folder in options.checkpoints.items()
    }
    original, converted = own.get("original", {}), own.get("converted", {})
    if original and converted and original != converted:
        raise UsageError(
            f"{options.checkpoints['original']} was trained under {original}, but"
            f" {options.checkpoints['converted']} under {converted}: they are not one model;"
            " compare a folder with what was exported from it"
        )
    shared = original or converted

    rules = {}
    for role, folder in options.checkpoints.items():
        trained = own[role] if role == "trained" else shared
        rules[str(folder.resolve())] = follow(folder, trained, options.video_rules, show)
    return rules


def _own_dtype(folder: Path) -> str:
    """The data type of most weights of a folder, by torch's name."""
    from megatron_vl.weights.tensor_files import DTYPES, dtype_name

    tensors = check_folder(folder)
    codes = [tensors.code(name) for name in tensors.where]
    return dtype_name(DTYPES.get(max(set(codes), key=codes.count), next(iter(DTYPES.values()))))


def _check_out(out: Path) -> None:
    """Raises UsageError if ``--out`` holds something else than an earlier evaluation."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARK).exists())):
        raise UsageError(
            f"--out {out} is not empty and was not written by an earlier evaluation; give another folder"
        )


def _prepare(options: EvaluationOptions) -> Path:
    """Makes a fresh work folder in ``--out``."""
    out = options.out
    work = (out / "work").resolve()
    # Otherwise answers of an earlier evaluation would count as answers of this one.
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / "tmp").mkdir()
    copy_tables(options.data, options.lmu_data, work / "tables")
    (out / MARK).touch()
    return work


def why_open(work: Path, network: bool) -> str:
    """Why :func:`cage.command` does not work here; empty if it works."""
    done = subprocess.run([*cage.command(work, network), "-c", ""], capture_output=True, text=True)
    said = done.stderr.strip().rpartition("\n")[2]
    return (said or f"exit code {done.returncode}") if done.returncode else ""


def _isolation(work: Path, judged: bool) -> str:
    """Describes how VLMEvalKit's processes are isolated; begins with CLOSED where the
    system confines them."""
    if why := why_open(work, judged):
        return f"with Python's guards only: this system cannot confine a process ({why})"
    return f"{CLOSED} and {'with the network, for the judge' if judged else 'without a network'}"


class _Workers:
    """The processes of :mod:`worker`; none of them survives."""

    def __init__(self, options: EvaluationOptions, settings: dict[str, Any], work: Path) -> None:
        self.options = options
        self.work = work
        closed = settings["isolation"].startswith(CLOSED)
        self.python = cage.command(work, bool(options.judge_url)) if closed else [sys.executable]
        self.running: list[subprocess.Popen[bytes]] = []

        job = {
            "data": options.data,
            "root": str(options.lmu_data.resolve()),
            "work": str(work),
            "settings": settings,
            "limit": options.limit,
            "judge": options.judge,
            "judge_url": options.judge_url,
            "scores": options.scores,
            "processes": settings["processes"],
            "logit_questions": options.logit_questions,
        }
        (work / "job.json").write_text(json.dumps(job, indent=1))

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.wait()

    def start(self, processes: int) -> None:
        """Starts the workers; each checks the data set and waits."""
        for rank in range(processes):
            command = [*self.python, "-m", "toolkit.evaluate.worker", str(self.work / "job.json"), str(rank)]
            with (self.work / f"worker_{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    command,
                    env=_environment(self.options, self.work, rank),
                    cwd=self.options.lmu_data.resolve(),  # tables may name pictures relative to it
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self.running.append(process)

    def go(self, folders: dict[str, str]) -> None:
        """Lets the workers continue with these checkpoints. Raises like :meth:`check`."""
        for rank, process in enumerate(self.running):
            _tell(process, json.dumps(folders), last=rank > 0)
        self.check()

    def check(self) -> None:
        """Raises UserError if a worker failed, UsageError if the data set was the reason."""
        for rank, process in enumerate(self.running):
            if process.poll():
                lines = (
                    (self.work / f"worker_{rank}.log").read_text(errors="replace").strip().splitlines()[-12:]
                )
                if process.returncode == UNUSABLE:
                    raise UsageError(lines[-1])
                raise UserError(
                    f"worker {rank} failed with exit code {process.returncode}:\n" + "\n".join(lines)
                )

    def wait(self, progress: _Progress) -> None:
        """Waits until all have ended; the first one scores when the others are done.
        Raises like :meth:`check`."""
        self._await(self.running[1:], progress)
        _tell(self.running[0], "score", last=True)
        self._await(self.running[:1], progress)

    def _await(self, processes: list[subprocess.Popen[bytes]], progress: _Progress) -> None:
        while any(process.poll() is None for process in processes):
            self.check()
            time.sleep(0.2)
            progress.look()
        self.check()


def _tell(process: subprocess.Popen[bytes], line: str, *, last: bool) -> None:
    """Writes a line to a process' standard input; closes it after the last line, so that no reader
    waits for more."""
    try:
        assert process.stdin is not None
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        if last:
            process.stdin.close()
    except BrokenPipeError:  # the process has ended; check() says why
        process.wait()


def _environment(options: EvaluationOptions, work: Path, rank: int) -> dict[str, str]:
    """Variables of a worker: nothing from a surrounding torchrun, no network, an empty data-set folder, and a
    folder for temporary files, the only one that a confined process has."""
    data = work / f"data_{rank}"
    data.mkdir(exist_ok=True)
    hidden = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MMEVAL_ROOT PRED_FORMAT EVAL_FORMAT SKIP_ERR "
    hidden += "LOCAL_LLM FWD_API EVAL_PROXY FORCE_LOCAL SPLIT_THINK"
    environment = {name: value for name, value in os.environ.items() if name not in hidden.split()}
    repository = str(Path(__file__).resolve().parents[2])
    environment |= {"LMUData": str(data), "TMPDIR": str(work / "tmp"), "VLMEVALKIT_USE_MODELSCOPE": "0"}
    environment["TRITON_CACHE_DIR"] = str(work / "tmp" / "triton")
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {
        "PYTHONPATH": os.pathsep.join([repository, *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    if options.judge_url:
        environment |= dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(HERE))
    if options.device != "cpu" and (visible := _gpus(options.gpus_per_process, rank)):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)

    return environment


def _gpus(each: int, rank: int) -> list[str]:
    """The GPUs of one process, named as in this process' CUDA_VISIBLE_DEVICES."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    return names[rank * each : (rank + 1) * each]


class _Progress:
    """Number of answers so far, their rate and the time left, from the files that workers write."""

    def __init__(self, work: Path, names: dict[str, str], show: Callable[[str], None]) -> None:
        self.work = work
        self.names = names
        self.show = show
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
                self.show(f"all {total} questions are answered; VLMEvalKit is judging")
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
