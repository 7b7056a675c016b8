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

from huggingface_hub import constants

from megatron_vl.data.sample.chat import read_chat_template
from megatron_vl.data.sample.thinking import switches_thinking
from megatron_vl.errors import UsageError, UserError
from megatron_vl.spec.families import read_spec
from megatron_vl.weights.video_rule import exported_video_rule
from toolkit.evaluate import gates
from toolkit.evaluate.adapter import NO_JUDGE, QUESTIONS, UNUSABLE, read_answers
from toolkit.evaluate.gates import Gate
from toolkit.evaluate.options import EvaluateOptions
from toolkit.evaluate.sandbox import copy_data, environment, sandbox
from toolkit.hf import check_folder
from toolkit.trained_rules import follow

MARK = ".megatron-vl-evaluate"
VLMEVALKIT = "0.0.20"
PACKAGES = ("ms-vlmeval", "transformers", "torch")
ANSWER, THOUGHT = 256, 32768
"""Default largest number of tokens of an answer, without and with thinking."""
LARGEST_PICTURE = 128_000_000
"""Pixels of the largest picture that is read."""
HERE = ("localhost", "127.0.0.1", "::1")
"""Host names of this machine."""


@dataclass
class Result:
    """The results of an evaluation."""

    data: str
    questions: int
    settings: dict[str, Any]
    checkpoints: dict[str, dict[str, Any]]
    """Role -> folder, hash, metrics, problem, and the number of questions that were not answered because the
    model was still thinking."""
    gates: list[Gate] = field(default_factory=list)
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Role -> the lines that :mod:`adapter` wrote."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(gate.passed is not False for gate in self.gates)

    def as_json(self) -> dict[str, Any]:
        """Everything except the answers."""
        rest = {name: value for name, value in asdict(self).items() if name != "answers"}
        return {"passed": self.passed} | rest


def evaluate(options: EvaluateOptions, show: Callable[[str], None]) -> Result:
    """Evaluates all checkpoints of ``options`` and judges the conversion.

    Raises:
        UsageError: a folder, table or number is invalid.
        UserError: a process of VLMEvalKit failed; the message ends with the last lines of its log.
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

    checkpoints: dict[str, dict[str, Any]] = {}
    for role, folder in options.checkpoints.items():
        show(f"{role}: reading {folder}")
        facts = {"folder": str(folder), "sha256": folder_hash(folder)}
        checkpoints[role] = facts | {"metrics": {}, "problem": "", "unanswered": 0}

    result = Result(options.data, 0, settings, checkpoints)
    result.gates.append(gates.tensors(options.checkpoints["original"], options.checkpoints["converted"]))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / MARK).touch()
    if result.passed or options.keep_going:
        _answer_and_score(options, result, show)
    else:
        why = "not run: an earlier gate failed; --keep-going runs it"
        result.gates += [Gate(name, None, why) for name in gates.ORDER[1:]]

    result.seconds = round(time.monotonic() - start, 1)
    return result


def _answer_and_score(options: EvaluateOptions, result: Result, show: Callable[[str], None]) -> None:
    work = (options.out / "work").resolve()
    names = _prepare(options, work, result)
    words, result.settings["isolation"] = sandbox(work, network=bool(options.judge_base_url))
    show(f"VLMEvalKit runs {result.settings['isolation']}")
    show(f"importing VLMEvalKit, which reads {options.data}: this takes up to half a minute")

    progress = _Progress(work, names, show)
    processes = result.settings["processes"]
    if processes > 1:
        _run(options, work, words, list(range(processes)), progress)
    if processes == 1 or not options.no_scores:
        _run(options, work, words, [None], progress)

    result.answers = {role: read_answers(work / name) for role, name in names.items()}
    result.questions = int((work / QUESTIONS).read_text())
    for role, name in names.items():
        facts = result.checkpoints[role]
        facts["unanswered"] = sum(line["unanswered"] for line in result.answers[role])
        if not options.no_scores:
            facts["metrics"], facts["problem"] = read_scores(work / "results_all" / name, options.data)

    original, converted = result.answers["original"], result.answers["converted"]
    result.gates += [
        gates.logits(original, converted, work / names["original"], work / names["converted"]),
        gates.text(original, converted, result.questions),
        gates.scores(
            {role: facts["metrics"] for role, facts in result.checkpoints.items()},
            {role: facts["problem"] for role, facts in result.checkpoints.items() if facts["problem"]},
        )
        if not options.no_scores
        else Gate("scores", None, "not asked for: --no-scores"),
    ]


def _prepare(options: EvaluateOptions, work: Path, result: Result) -> dict[str, str]:
    """Clears the work folder, except for the answers of an interrupted evaluation that was the same.

    Returns:
        Role -> name of its folder in ``work``, which VLMEvalKit takes for the name of a model.
    """
    work.mkdir(exist_ok=True)
    for path in work.iterdir():
        if path.is_file():
            path.unlink()
        elif "-" not in path.name:  # not the answers of a checkpoint
            shutil.rmtree(path)
    settings = result.settings
    processes = settings["processes"]
    tables = [copy_data(options.data, options.tables, work, rank) for rank in range(processes)][0]
    settings["tables"] = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in tables}

    # Evaluations with the same key have the same answers, and pictures in the same folders.
    same = {name: value for name, value in settings.items() if name != "judge"}
    same |= {"data": options.data, "limit": options.limit, "logit_questions": options.logit_questions}
    names = {}
    for role, facts in result.checkpoints.items():
        key = json.dumps([facts["sha256"], same], sort_keys=True)
        names[role] = f"{role}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    for path in work.glob("*-*"):
        if path.name not in names.values():
            shutil.rmtree(path)
    for name in ("tmp", *names.values()):
        (work / name).mkdir(exist_ok=True)

    job = {
        "data": options.data,
        "work": str(work),
        "checkpoints": {names[role]: str(folder.resolve()) for role, folder in options.checkpoints.items()},
        "settings": settings,
        "roots": [str(work), str(options.tables), constants.HF_HUB_CACHE],
        "limit": options.limit,
        "judge": options.judge,
        "judge_url": options.judge_base_url,
        "scores": not options.no_scores,
        "processes": processes,
        "logit_questions": options.logit_questions,
    }
    (work / "job.json").write_text(json.dumps(job, indent=1))
    return names


def _run(
    options: EvaluateOptions, work: Path, words: list[str], ranks: list[int | None], progress: _Progress
) -> None:
    """Runs processes of VLMEvalKit to their end; none of them survives.

    Raises:
        UsageError: one cannot use the data set.
        UserError: one failed.
    """
    running: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for rank in ranks:
            variables = environment(work, rank or 0)
            if options.device != "cpu" and (visible := _gpus(options.gpus_per_process, rank or 0)):
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
            command = [*words, sys.executable, "-P", "-m", "toolkit.evaluate.adapter", str(work / "job.json")]
            log = work / f"vlmevalkit_{'all' if rank is None else rank}.log"
            with log.open("wb") as file:
                running[log] = subprocess.Popen(
                    command + ([] if rank is None else [str(rank)]),
                    env=variables,
                    cwd=variables["LMUData"],  # tables may name pictures relative to it
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )

        while any(process.poll() is None for process in running.values()):
            _check(running)
            time.sleep(0.2)
            progress.look()
        _check(running)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _check(running: dict[Path, subprocess.Popen[bytes]]) -> None:
    for log, process in running.items():
        if process.poll():
            lines = log.read_text(errors="replace").strip().splitlines()[-12:]
            if process.returncode == UNUSABLE:
                raise UsageError(lines[-1])
            ended = f"VLMEvalKit ended with exit code {process.returncode}; see {log}:\n"
            raise UserError(ended + "\n".join(lines))


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


def _settings(options: EvaluateOptions) -> dict[str, Any]:
    """The settings of all checkpoints; chooses those that were not given. Raises UsageError."""
    import torch

    if options.judge_base_url and urlsplit(options.judge_base_url).hostname not in HERE:
        raise UsageError(
            f"--judge-base-url {options.judge_base_url}: the judge must be on this machine"
            f" ({', '.join(HERE)})"
        )
    if bool(options.judge_base_url) != (options.judge != NO_JUDGE):
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
        "largest_picture": LARGEST_PICTURE,
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


def video_rules(options: EvaluateOptions, show: Callable[[str], None]) -> dict[str, dict[str, str]]:
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
        rules[str(folder.resolve())] = follow(folder, trained, options.asked_rules(), show)
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
