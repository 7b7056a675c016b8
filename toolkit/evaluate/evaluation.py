"""Runs one evaluation: hashes, gates, worker processes, scores."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants

from converters.convert import export_weights
from megatron_vl.data.sample.thinking import has_thinking_switch
from megatron_vl.errors import UsageError, UserError
from megatron_vl.spec.families.hf_folder import read_chat_template
from toolkit.evaluate import gates
from toolkit.evaluate.gates import ConversionGate
from toolkit.evaluate.options import EvaluateOptions
from toolkit.evaluate.sandbox import choose_sandbox, copy_data, process_variables
from toolkit.evaluate.vlmevalkit_adapter import (
    NO_JUDGE,
    QUESTION_COUNT_FILE,
    UNUSABLE_EXIT_CODE,
    read_answers,
)
from toolkit.hf_loading import check_hf_folder

MARKER_FILE = ".megatron-vl-evaluate"
VLMEVALKIT_VERSION = "0.0.20"
REPORTED_PACKAGES = ("ms-vlmeval", "transformers", "torch")
MAX_ANSWER_TOKENS, MAX_THINKING_TOKENS = 256, 32768
"""Default largest number of tokens of an answer, without and with thinking."""
MAX_PICTURE_PIXELS = 128_000_000
"""Pixels of the largest picture that is read."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Host names of this machine."""


@dataclass
class EvaluationResult:
    """The results of an evaluation."""

    data: str
    questions: int
    settings: dict[str, Any]
    checkpoints: dict[str, dict[str, Any]]
    """Role -> folder, hash, metrics, problem, and the number of questions that were not answered because the
    model was still thinking."""
    gates: list[ConversionGate] = field(default_factory=list)
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Role -> the lines that :mod:`vlmevalkit_adapter` wrote."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(gate.passed is not False for gate in self.gates)

    def as_json(self) -> dict[str, Any]:
        """Everything except the answers."""
        json_fields = {"passed": self.passed, **asdict(self)}
        del json_fields["answers"]
        return json_fields


def run_evaluation(options: EvaluateOptions, show_progress: Callable[[str], None]) -> EvaluationResult:
    """Evaluates all checkpoints of ``options`` and judges the conversion.

    Raises:
        UsageError: a folder, table or number is invalid.
        UserError: a process of VLMEvalKit failed; the message ends with the last lines of its log.
        ConfigError, WeightsError: a checkpoint is invalid.
    """
    start_time = time.monotonic()
    _check_folders(options)
    model_settings = _choose_settings(options)
    if options.adapter is not None:
        _merge_adapter(options, show_progress)

    facts_by_role: dict[str, dict[str, Any]] = {}
    for role, hf_dir in options.checkpoints.items():
        show_progress(f"{role}: reading {hf_dir}")
        facts = {"folder": str(hf_dir), "sha256": folder_hash(hf_dir)}
        facts_by_role[role] = facts | {"metrics": {}, "problem": "", "unanswered": 0}

    # The strictest gate comes first and takes seconds. The others run the models.
    result = EvaluationResult(options.data, 0, model_settings, facts_by_role)
    result.gates.append(
        gates.compare_tensors(options.checkpoints["original"], options.checkpoints["converted"])
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / MARKER_FILE).touch()
    if result.passed or options.keep_going:
        _answer_and_score(options, result, show_progress)
    else:
        skip_reason = "not run: an earlier gate failed; --keep-going runs it"
        result.gates += [ConversionGate(name, None, skip_reason) for name in gates.GATE_ORDER[1:]]

    result.seconds = round(time.monotonic() - start_time, 1)
    return result


def _merge_adapter(options: EvaluateOptions, show_progress: Callable[[str], None]) -> None:
    """Makes the original with its adapters the trained checkpoint, which VLMEvalKit can load."""
    assert options.adapter is not None
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / MARKER_FILE).touch()
    options.trained = options.out / "merged"
    show_progress(f"trained: merging {options.adapter} into {options.trained}")
    export_weights(options.adapter, options.original, options.trained, force=True, merges_adapter=True)


def _answer_and_score(
    options: EvaluateOptions, result: EvaluationResult, show_progress: Callable[[str], None]
) -> None:
    """Lets all checkpoints answer the questions, and adds answers, scores and gates to ``result``."""
    work_dir = (options.out / "work").resolve()
    answer_folders = _prepare_work_dir(options, work_dir, result)
    _run_vlmevalkit(options, work_dir, result, _AnswerProgress(work_dir, answer_folders, show_progress))

    result.questions = int((work_dir / QUESTION_COUNT_FILE).read_text())
    for role, folder_name in answer_folders.items():
        facts = result.checkpoints[role]
        result.answers[role] = read_answers(work_dir / folder_name)
        facts["unanswered"] = sum(line["unanswered"] for line in result.answers[role])
        if not options.no_scores:
            results_dir = work_dir / "results_all" / folder_name
            facts["metrics"], facts["problem"] = read_scores(results_dir, options.data)

    original, converted = result.answers["original"], result.answers["converted"]
    original_dir, converted_dir = (work_dir / answer_folders[role] for role in ("original", "converted"))
    result.gates += [
        gates.compare_logits(original, converted, original_dir, converted_dir),
        gates.compare_answers(original, converted, result.questions),
        ConversionGate("scores", None, "not asked for: --no-scores")
        if options.no_scores
        else gates.compare_scores(result.checkpoints),
    ]


def _run_vlmevalkit(
    options: EvaluateOptions, work_dir: Path, result: EvaluationResult, progress: _AnswerProgress
) -> None:
    """Several processes share the questions. A last one reads all answers and scores them."""
    sandbox_words, isolation = choose_sandbox(work_dir, with_network=bool(options.judge_base_url))
    result.settings["isolation"] = isolation
    progress.show_progress(f"VLMEvalKit runs {isolation}")
    progress.show_progress(
        f"importing VLMEvalKit, which reads {options.data}: this takes up to half a minute"
    )
    num_processes = result.settings["processes"]
    if num_processes > 1:
        _run_processes(options, work_dir, sandbox_words, list(range(num_processes)), progress)
    if num_processes == 1 or not options.no_scores:
        _run_processes(options, work_dir, sandbox_words, [None], progress)


def _prepare_work_dir(options: EvaluateOptions, work_dir: Path, result: EvaluationResult) -> dict[str, str]:
    """Clears the work folder, except for the answers of an interrupted evaluation that was the same.

    Returns:
        Role -> name of its folder in ``work_dir``, which VLMEvalKit takes for the name of a model.
    """
    work_dir.mkdir(exist_ok=True)
    for work_path in work_dir.iterdir():
        if work_path.is_file():
            work_path.unlink()
        elif "-" not in work_path.name:  # not the answers of a checkpoint
            shutil.rmtree(work_path)

    model_settings = result.settings
    for rank in range(model_settings["processes"]):
        tables = copy_data(options.data, options.tables, work_dir, rank)
    model_settings["tables"] = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in tables}
    answer_folders = _answer_folders(options, result)
    for work_path in work_dir.glob("*-*"):
        if work_path.name not in answer_folders.values():
            shutil.rmtree(work_path)
    for entry_name in ("tmp", *answer_folders.values()):
        (work_dir / entry_name).mkdir(exist_ok=True)

    job = {
        "data": options.data,
        "work": str(work_dir),
        "checkpoints": {
            answer_folders[role]: str(path.resolve()) for role, path in options.checkpoints.items()
        },
        "settings": model_settings,
        "roots": [str(work_dir), str(options.tables), constants.HF_HUB_CACHE],
        "limit": options.limit,
        "judge": options.judge,
        "judge_url": options.judge_base_url,
        "scores": not options.no_scores,
        "processes": model_settings["processes"],
        "logit_questions": options.logit_questions,
    }
    (work_dir / "job.json").write_text(json.dumps(job, indent=1))
    return answer_folders


def _answer_folders(options: EvaluateOptions, result: EvaluationResult) -> dict[str, str]:
    """Names that evaluations share if their answers, and the folders of their pictures, are the same."""
    answer_settings = {
        **result.settings,
        "data": options.data,
        "limit": options.limit,
        "logit_questions": options.logit_questions,
    }
    del answer_settings["judge"]  # it comes after the answers
    answer_folders = {}
    for role, facts in result.checkpoints.items():
        answers_key = json.dumps([facts["sha256"], answer_settings], sort_keys=True)
        answer_folders[role] = f"{role}-{hashlib.sha256(answers_key.encode()).hexdigest()[:16]}"
    return answer_folders


def _run_processes(
    options: EvaluateOptions,
    work_dir: Path,
    sandbox_words: list[str],
    ranks: list[int | None],
    progress: _AnswerProgress,
) -> None:
    """Runs processes of VLMEvalKit to their end; none of them survives.

    Raises:
        UsageError: one cannot use the data set.
        UserError: one failed.
    """
    process_by_log: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for rank in ranks:
            log_path = work_dir / f"vlmevalkit_{'all' if rank is None else rank}.log"
            process_by_log[log_path] = _start_process(options, work_dir, sandbox_words, rank, log_path)

        while any(process.poll() is None for process in process_by_log.values()):
            _check_processes(process_by_log)
            time.sleep(0.2)
            progress.show_counts()
        _check_processes(process_by_log)
    finally:
        for process in process_by_log.values():
            process.kill()
            process.wait()


def _start_process(
    options: EvaluateOptions, work_dir: Path, sandbox_words: list[str], rank: int | None, log_path: Path
) -> subprocess.Popen[bytes]:
    """Starts VLMEvalKit for one share of the questions, or for all of them."""
    process_environment = process_variables(work_dir, rank or 0)
    if options.device != "cpu" and (visible_gpus := _process_gpus(options.gpus_per_process, rank or 0)):
        process_environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus)
    adapter_words = ["-P", "-m", "toolkit.evaluate.vlmevalkit_adapter", str(work_dir / "job.json")]
    rank_words = [] if rank is None else [str(rank)]
    with log_path.open("wb") as log_file:
        return subprocess.Popen(
            [*sandbox_words, sys.executable, *adapter_words, *rank_words],
            env=process_environment,
            cwd=process_environment["LMUData"],  # tables may name pictures relative to it
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
        )


def _check_processes(process_by_log: dict[Path, subprocess.Popen[bytes]]) -> None:
    for log_path, process in process_by_log.items():
        if process.poll():
            lines = log_path.read_text(errors="replace").strip().splitlines()[-12:]
            if process.returncode == UNUSABLE_EXIT_CODE:
                raise UsageError(lines[-1])
            exit_message = f"VLMEvalKit ended with exit code {process.returncode}; see {log_path}:\n"
            raise UserError(exit_message + "\n".join(lines))


def read_scores(results_dir: Path, dataset_name: str) -> tuple[dict[str, float], str]:
    """The metrics that VLMEvalKit wrote for a checkpoint, and its message if it wrote none."""
    status_path = results_dir / "status.json"
    if not status_path.is_file():
        return {}, "VLMEvalKit wrote no status.json"
    status_fields = json.loads(status_path.read_text()).get("datasets", {}).get(dataset_name, {})

    if skip_reason := status_fields.get("error_message") or status_fields.get("skip_reason"):
        return {}, skip_reason

    metrics = {}
    for name, value in status_fields.get("metrics", {}).items():
        # A metric is NaN if no question of its kind was asked.
        if isinstance(value, (int, float)) and not math.isnan(value):
            metrics[name] = value
    return metrics, "" if metrics else f"VLMEvalKit stopped at {status_fields.get('status')!r}"


def folder_hash(hf_dir: Path) -> str:
    """SHA-256 of the names and contents of a checkpoint's files, which determine its answers."""
    tensor_folder = check_hf_folder(hf_dir)
    folder_digest = hashlib.sha256()
    for name in sorted([*tensor_folder.reader_by_file, *map(str, tensor_folder.companion_files()[0])]):
        with (hf_dir / name).open("rb") as opened_file:
            file_digest = hashlib.file_digest(opened_file, "sha256").hexdigest()
        folder_digest.update(f"{name} {file_digest}\n".encode())
    return folder_digest.hexdigest()


def _choose_settings(options: EvaluateOptions) -> dict[str, Any]:
    """The settings of all checkpoints, with a choice for those that were not given.

    Raises:
        UsageError: the options do not fit together, or this machine lacks what they need.
    """
    _check_options(options)
    device, num_processes = _choose_processes(options)
    check_vlmevalkit()
    versions = {package: version(package) for package in REPORTED_PACKAGES}
    return {
        "dtype": options.dtype or _weights_dtype(options.checkpoints["original"]),
        "device": "auto" if device == "cuda" and options.gpus_per_process > 1 else device,
        "processes": num_processes,
        "gpus_per_process": options.gpus_per_process if device == "cuda" else 0,
        "min_pixels": options.min_pixels,
        "max_pixels": options.max_pixels,
        "largest_picture": MAX_PICTURE_PIXELS,
        "video_fps": options.video_fps,
        "video_max_frames": options.video_max_frames,
        "thinking": options.thinking,
        "max_new_tokens": options.max_new_tokens or MAX_ANSWER_TOKENS,
        "max_new_tokens_thinking": options.max_new_tokens or MAX_THINKING_TOKENS,
        "judge": options.judge,
        "versions": versions | {"python": platform.python_version()},
    }


def _check_options(options: EvaluateOptions) -> None:
    if options.judge_base_url and urlsplit(options.judge_base_url).hostname not in LOCAL_HOSTS:
        raise UsageError(
            f"--judge-base-url {options.judge_base_url}: the judge must be on this machine"
            f" ({', '.join(LOCAL_HOSTS)})"
        )
    if bool(options.judge_base_url) != (options.judge != NO_JUDGE):
        raise UsageError(
            "--judge and --judge-base-url must be given together; without a server only exact_matching judges"
        )

    if options.video_fps is not None and not options.video_fps > 0:
        raise UsageError(f"--video-fps {options.video_fps} must be above 0")


def _choose_processes(options: EvaluateOptions) -> tuple[str, int]:
    """The device, and the number of processes that share the questions."""
    import torch

    num_gpus = torch.cuda.device_count()
    device = options.device or ("cuda" if num_gpus else "cpu")
    if device == "cpu":
        return device, options.processes or 1
    if num_gpus < options.gpus_per_process:
        raise UsageError(
            f"--gpus-per-process {options.gpus_per_process}, but this machine has {num_gpus} GPUs"
        )
    num_processes = options.processes or num_gpus // options.gpus_per_process
    if num_processes * options.gpus_per_process > num_gpus:
        raise UsageError(
            f"--processes {num_processes} of {options.gpus_per_process} GPUs "
            f"each: this machine has {num_gpus} GPUs"
        )
    return device, num_processes


def check_vlmevalkit() -> None:
    """Raises UsageError if VLMEvalKit is missing or has another version."""
    try:
        installed_version = version("ms-vlmeval")
    except PackageNotFoundError:
        installed_version = ""
    if installed_version != VLMEVALKIT_VERSION:
        state = f"is installed as version {installed_version}" if installed_version else "is missing"
        raise UsageError(
            f"VLMEvalKit {state}; version {VLMEVALKIT_VERSION} is needed, so install the eval extra:"
            " pip install 'megatron-vl[eval]'"
        )


def _weights_dtype(hf_dir: Path) -> str:
    """The data type of most weights of a folder, by torch's name."""
    from megatron_vl.weights.tensor_files import DTYPE_BY_CODE, dtype_name

    tensor_folder = check_hf_folder(hf_dir)
    code_counts = Counter(tensor_folder.dtype_code(name) for name in tensor_folder.file_by_tensor)
    most_frequent_code = code_counts.most_common(1)[0][0]
    return dtype_name(DTYPE_BY_CODE.get(most_frequent_code, next(iter(DTYPE_BY_CODE.values()))))


def _check_folders(options: EvaluateOptions) -> None:
    """Raises UsageError if ``--out`` holds something else, or a checkpoint cannot be asked as requested."""
    if options.out.exists():
        is_earlier_evaluation = (options.out / MARKER_FILE).exists()
        if not options.out.is_dir() or (any(options.out.iterdir()) and not is_earlier_evaluation):
            raise UsageError(
                f"--out {options.out} is not empty and was not written "
                "by an earlier evaluation; give another folder"
            )
    for hf_dir in options.checkpoints.values():
        check_hf_folder(hf_dir)
        if options.thinking and not has_thinking_switch(read_chat_template(hf_dir)):
            raise UsageError(
                f"--thinking {options.thinking}: the chat template of {hf_dir} has no switch for it"
                " (enable_thinking); leave out --thinking"
            )


def _process_gpus(gpus_per_process: int, rank: int) -> list[str]:
    """The GPUs of one process, named as in this process' CUDA_VISIBLE_DEVICES."""
    import torch

    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        visible_devices.split(",") if visible_devices else [str(i) for i in range(torch.cuda.device_count())]
    )
    return names[rank * gpus_per_process : (rank + 1) * gpus_per_process]


class _AnswerProgress:
    """Number of answers so far, their rate and the time left, from the files that workers write."""

    def __init__(
        self, work_dir: Path, answer_folders: dict[str, str], show_progress: Callable[[str], None]
    ) -> None:
        self.work_dir = work_dir
        self.answer_folders = answer_folders
        self.show_progress = show_progress
        self.first_measurement: tuple[float, int] | None = None
        self.is_judging = False
        self.last_shown_time = time.monotonic()
        self.interval_seconds = 2.0 if sys.stderr.isatty() else 15.0

    def show_counts(self) -> None:
        current_time = time.monotonic()
        if current_time - self.last_shown_time < self.interval_seconds:
            return

        self.last_shown_time = current_time
        counts = {}
        for role, folder_name in self.answer_folders.items():
            counts[role] = sum(map(_count_lines, (self.work_dir / folder_name).glob("answers_*.jsonl")))
        num_answers = sum(counts.values())
        count_path = self.work_dir / QUESTION_COUNT_FILE
        num_questions = int(count_path.read_text() or 0) if count_path.is_file() else 0
        if not num_answers or not num_questions:
            return

        total_answers = len(self.answer_folders) * num_questions
        if num_answers == total_answers:
            if not self.is_judging:
                self.show_progress(f"all {total_answers} questions are answered; VLMEvalKit is judging")
            self.is_judging = True
            return

        counts_text = ", ".join(f"{role} {count}" for role, count in counts.items())
        if self.first_measurement is None:  # loading the model is not part of the rate
            self.first_measurement = (current_time, num_answers)
        first_time, first_count = self.first_measurement
        rate = (num_answers - first_count) / (current_time - first_time) if current_time > first_time else 0.0
        time_left = f"; {rate:.1f}/s, {(total_answers - num_answers) / rate:.0f} s left" if rate else ""
        self.show_progress(f"answers of {total_answers}: {counts_text}{time_left}")


def _count_lines(file_path: Path) -> int:
    with file_path.open("rb") as opened_file:
        return sum(1 for _ in opened_file)
