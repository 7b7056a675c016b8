"""Runs one evaluation: exports, tensors, VLMEvalKit, answers, scores."""

import hashlib
import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from huggingface_hub import constants

from converters.compare import compare_weights
from converters.convert import export_weights
from converters.fp8 import Fp8Folder
from converters.peft_folder import is_peft_folder
from megatron_vl.data.sample.thinking import has_thinking_switch
from megatron_vl.spec.families.hf_folder import read_chat_template
from megatron_vl.system.errors import UsageError, UserError
from megatron_vl.system.json_files import file_sha256
from megatron_vl.system.processes import kill_process_tree
from megatron_vl.weights.tensor_files import DTYPE_BY_CODE, dtype_name
from megatron_vl.weights.trained_media import exported_facts
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.common.hf_loading import check_hf_folder
from toolkit.common.launch import usable_gpus
from toolkit.doctor.machine_checks import installed_version
from toolkit.evaluate.options import EvaluateOptions
from toolkit.evaluate.sandbox import choose_sandbox, copy_data, process_variables
from toolkit.evaluate.vlmevalkit_adapter import NO_JUDGE, QUESTION_COUNT_FILE, UNUSABLE_FILE

MARKER_FILE = ".megatron-vl-evaluate"
VLMEVALKIT_VERSION = "0.0.20"


@dataclass
class Evaluation:
    data: str
    settings: dict[str, Any]
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Role -> folder, hash, what was compared, metrics, VLMEvalKit's name of the model, and the number of
    questions that were not answered because the model was still thinking."""
    questions: int = 0
    problems: list[str] = field(default_factory=list)
    """What differs from the original or is missing, one line each."""


def show_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_evaluation(options: EvaluateOptions, dataset_name: str, lmu_data: Path) -> Evaluation:
    """Compares and scores the checkpoints of ``options``.

    Raises:
        UsageError: a folder, table or number is invalid.
        UserError: VLMEvalKit failed; the message ends with the last lines of its log.
        ConfigError, WeightsError: a checkpoint is invalid.
    """
    check_hf_folder(options.original)
    _check_options(options)
    result = Evaluation(dataset_name, _choose_settings(options))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / MARKER_FILE).touch()

    roles = {"original": options.original, "converted": options.converted, "trained": options.trained}
    for role, folder in roles.items():
        if folder is not None:
            show_line(f"{role}: reading {folder}")
            hf_dir = exported_folder(folder, options.original, options.out / role)
            result.checkpoints[role] = {
                "folder": str(hf_dir.resolve()),
                "sha256": folder_hash(hf_dir),
                **{"tensors": "", "answers": "", "metrics": {}, "unanswered": 0},
            }
    original, converted = result.checkpoints["original"], result.checkpoints["converted"]
    comparison = compare_weights(Path(original["folder"]), Path(converted["folder"]))
    differences = [f"tensor {difference.name}: {difference.how}" for difference in comparison.differences]
    original["tensors"] = f"{comparison.tensors}, {comparison.bytes / 1e9:.3g} GB"
    converted["tensors"] = f"{len(differences)} differ" if differences else "identical"
    result.problems += differences
    # The comparison took seconds; what follows can take hours.
    if not differences:
        _ask_and_score(options, result, lmu_data)
    return result


def exported_folder(folder: Path, original: Path, output_dir: Path) -> Path:
    """The Hugging Face folder of a checkpoint; a new export of a run, of Megatron weights or of adapters."""
    if (folder / "config.json").is_file():
        return folder
    is_adapter = is_peft_folder(folder) or bool(WeightReader(folder, takes_lora=True).lora.rank)
    export_weights(folder, original, output_dir, force=True, merges_adapter=is_adapter)
    return output_dir


def folder_hash(hf_dir: Path) -> str:
    """SHA-256 of what determines a checkpoint's answers: its files, and how it was trained."""
    tensor_folder = check_hf_folder(hf_dir)
    folder_digest = hashlib.sha256()
    for name in sorted([*tensor_folder.reader_by_file, *map(str, tensor_folder.companion_files()[0])]):
        folder_digest.update(f"{name} {file_sha256(hf_dir / name)}\n".encode())
    if facts := exported_facts(hf_dir):  # how media were encoded in training, and the template's arguments
        folder_digest.update(json.dumps(facts, sort_keys=True).encode())
    return folder_digest.hexdigest()


def _check_options(options: EvaluateOptions) -> None:
    judge_host = urlsplit(options.judge.partition("@")[2]).hostname
    if options.judge and not judge_host:
        raise UsageError(f"--judge {options.judge}: give the address of its server too, NAME@URL")
    if options.judge and judge_host not in ("localhost", "127.0.0.1", "::1"):
        raise UsageError(f"--judge {options.judge}: the judge must be on this machine")
    if options.out.exists() and any(options.out.iterdir()) and not (options.out / MARKER_FILE).exists():
        raise UsageError(
            f"--out {options.out} is not empty and of no earlier evaluation; give another folder"
        )
    if options.thinking and not has_thinking_switch(read_chat_template(options.original)):
        raise UsageError(
            f"--thinking {options.thinking}: the chat template of {options.original} has no switch for it"
            " (enable_thinking); leave out --thinking"
        )


def _package_versions() -> dict[str, str]:
    """Versions of what decides answers and scores. Raises UsageError if VLMEvalKit has another one."""
    found = installed_version("ms-vlmeval") or "missing"
    if found != VLMEVALKIT_VERSION:
        raise UsageError(
            f"VLMEvalKit {VLMEVALKIT_VERSION} is needed (installed: {found}), so install the eval extra:"
            " pip install 'megatron-vl[eval]'"
        )
    return {"ms-vlmeval": found, "transformers": version("transformers"), "torch": version("torch")}


def _choose_settings(options: EvaluateOptions) -> dict[str, Any]:
    tensor_folder = check_hf_folder(options.original)
    [(code, _)] = Counter(map(tensor_folder.dtype_code, tensor_folder.file_by_tensor)).most_common(1)
    model_bytes = sum((options.original / name).stat().st_size for name in tensor_folder.reader_by_file)
    model_bytes *= 2 if isinstance(tensor_folder, Fp8Folder) else 1  # it is loaded in bfloat16
    num_gpus = usable_gpus()
    return {
        "thinking": options.thinking,
        "judge": options.judge.partition("@")[0] or NO_JUDGE,
        "limit": options.limit,
        # Other types than float32 are slow on CPU.
        "dtype": dtype_name(DTYPE_BY_CODE.get(code, torch.bfloat16)) if num_gpus else "float32",
        # So many bytes of weights fit one GPU beside activations; larger models are spread over several.
        "processes": max(1, num_gpus // math.ceil(model_bytes / 72e9)),
        # Without and with thinking, as in VLMEvalKit.
        "max_new_tokens": [options.max_new_tokens or limit for limit in (256, 32768)],
        "versions": _package_versions(),
    }


# --- VLMEvalKit ---------------------------------------------------------------------------------------------


def _ask_and_score(options: EvaluateOptions, result: Evaluation, lmu_data: Path) -> None:
    work_dir = (options.out / "work").resolve()
    _prepare_work_dir(options, work_dir, result, lmu_data)
    _run_vlmevalkit(options, work_dir, result)

    result.questions = int((work_dir / QUESTION_COUNT_FILE).read_text())
    for role, facts in result.checkpoints.items():
        results_dir = work_dir / "results" / facts["model"]
        facts["unanswered"] = sum(line["unanswered"] for line in read_answers(results_dir))
        facts["metrics"], problem = read_scores(results_dir, result.data)
        if problem:
            result.problems.append(f"{role}: no score; {problem}")
    original, converted = result.checkpoints["original"], result.checkpoints["converted"]
    answers_dirs = (work_dir / "results" / facts["model"] for facts in (original, converted))
    original["answers"], converted["answers"], differences = compare_answers(*answers_dirs)
    result.problems += differences + compare_scores(result.checkpoints)


def _prepare_work_dir(options: EvaluateOptions, work_dir: Path, result: Evaluation, lmu_data: Path) -> None:
    """Clears the work folder, except for the answers of an interrupted evaluation that was the same.

    VLMEvalKit goes on with the answers of a model by its name, so the name is a digest of what decides them.
    """
    for name in ("data", "cache", "tmp"):
        shutil.rmtree(work_dir / name, ignore_errors=True)
    (work_dir / "tmp").mkdir(parents=True)
    (work_dir / UNUSABLE_FILE).unlink(missing_ok=True)
    tables = copy_data(result.data, lmu_data, work_dir)
    result.settings["tables"] = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in tables}

    for role, facts in result.checkpoints.items():
        key = json.dumps([facts["sha256"], result.data, result.settings], sort_keys=True)
        facts["model"] = f"{role}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folder_by_model = {facts["model"]: facts["folder"] for facts in result.checkpoints.values()}
    for path in work_dir.glob("results/*-*"):
        if path.name not in folder_by_model:
            shutil.rmtree(path)
        (path / "status.json").unlink(missing_ok=True)  # VLMEvalKit would keep an error of last time
    job = {
        "data": result.data,
        "work": str(work_dir),
        "checkpoints": folder_by_model,
        "settings": result.settings,
        "roots": [str(work_dir), str(lmu_data), constants.HF_HUB_CACHE],
        "judge_url": options.judge.partition("@")[2],
    }
    (work_dir / "job.json").write_text(json.dumps(job, indent=1))


def _run_vlmevalkit(options: EvaluateOptions, work_dir: Path, result: Evaluation) -> None:
    """Runs VLMEvalKit in the sandbox to its end, with its own way of sharing questions between processes."""
    sandbox_words, isolation = choose_sandbox(work_dir, with_network=bool(options.judge))
    result.settings["isolation"] = isolation
    log_path = work_dir / "vlmevalkit.log"
    show_line(f"VLMEvalKit runs {isolation}; its imports take up to half a minute. Its log: {log_path}")
    command, processes = [*sandbox_words, sys.executable], result.settings["processes"]
    if processes > 1:
        command += f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split()
    environment = process_variables(work_dir)
    with log_path.open("wb") as log_file:
        process = subprocess.Popen(
            [*command, "-m", "toolkit.evaluate.vlmevalkit_adapter", str(work_dir / "job.json")],
            env=environment,
            cwd=environment["LMUData"],  # tables may name images relative to it
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
        )
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
            names = (facts["model"] for facts in result.checkpoints.values())
            counts = {name: len(read_answers(work_dir / "results" / name)) for name in names}
            if any(counts.values()):
                show_line("answers: " + ", ".join(f"{count} of {name}" for name, count in counts.items()))
    finally:
        kill_process_tree(process.pid)
        process.wait()
    if (work_dir / UNUSABLE_FILE).is_file():
        raise UsageError((work_dir / UNUSABLE_FILE).read_text())
    if process.returncode:
        log_end = "\n".join(log_path.read_text(errors="replace").strip().splitlines()[-12:])
        raise UserError(f"VLMEvalKit ended with exit code {process.returncode}; see {log_path}:\n{log_end}")


# --- What VLMEvalKit and its models wrote -------------------------------------------------------------------


def read_answers(answers_dir: Path) -> list[dict[str, Any]]:
    """The last answer to each prompt that all processes wrote for one checkpoint."""
    lines = {}
    for answers_path in sorted(answers_dir.glob("answers_*.jsonl")):
        for line_text in answers_path.read_text(encoding="utf-8").split("\n"):
            with suppress(json.JSONDecodeError):  # the end of an interrupted process
                line = json.loads(line_text)
                lines[line["key"]] = line
    return list(lines.values())


def read_scores(results_dir: Path, dataset_name: str) -> tuple[dict[str, float], str]:
    """The metrics that VLMEvalKit wrote for a checkpoint, and its reason if it wrote none."""
    status_path = results_dir / "status.json"
    if not status_path.is_file():
        return {}, "VLMEvalKit wrote no status.json"
    status = json.loads(status_path.read_text()).get("datasets", {}).get(dataset_name, {})
    if reason := status.get("error_message") or status.get("skip_reason"):
        return {}, reason
    metrics = {
        name: value
        for name, value in status.get("metrics", {}).items()
        # A metric is NaN if no question of its kind was asked.
        if isinstance(value, (int, float)) and not math.isnan(value)
    }
    return metrics, "" if metrics else f"VLMEvalKit stopped at {status.get('status')!r}"


def compare_answers(original_dir: Path, converted_dir: Path) -> tuple[str, str, list[str]]:
    """Compares the answers to each prompt, whose text is that of the folder's own processor.

    Args:
        original_dir, converted_dir: what :mod:`vlmevalkit_adapter` wrote for each.

    Returns:
        The number of answers and of those that differ, in words, and one line for each that differs.
    """
    expected, found = (
        {line["key"]: (line["answer"], line["thinking"]) for line in read_answers(folder)}
        for folder in (original_dir, converted_dir)
    )
    problems = [
        f"answer to prompt {key}: {expected.get(key)} and {found.get(key)}"
        for key in sorted(expected.keys() | found.keys())
        if expected.get(key) != found.get(key)
    ]
    return str(len(expected)), f"{len(problems)} differ" if problems else "identical", problems


def compare_scores(checkpoints: dict[str, dict[str, Any]]) -> list[str]:
    """The converted checkpoint scores what the original scores; every checkpoint has the same metrics."""
    expected, converted = (checkpoints[role]["metrics"] for role in ("original", "converted"))
    missing = [
        f"{role}: metric {name!r} is missing; only {'the original' if name in expected else role} has it"
        for role, facts in checkpoints.items()
        for name in sorted(expected.keys() ^ facts["metrics"].keys())
        if expected and facts["metrics"]  # otherwise VLMEvalKit's reason is a problem already
    ]
    return missing + [
        f"{name}: {expected[name]} and {converted[name]}"
        for name in sorted(expected.keys() & converted.keys())
        if converted[name] != expected[name]
    ]
