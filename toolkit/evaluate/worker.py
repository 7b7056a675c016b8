"""A process with VLMEvalKit and a model in it: ``python -m toolkit.evaluate.worker JOB.json RANK``, or ``... score``.

Of each checkpoint a worker writes the answers to its share of the questions (JSON lines) and, the first worker, the logits
of some prompts (safetensors and JSON). Scoring puts all answers where VLMEvalKit keeps its own unfinished work and lets its
``run.py`` go on from there, so that its own code reads the table, judges and writes ``status.json``.

VLMEvalKit 0.0.20, met here: importing it turns off certificate checks for the whole process, it evaluates cells of tables as
Python (``istype``, ``toliststr``), unpickles what it finds in the folder of data sets, downloads what is missing, and catches
every exception. So it has a process of its own, no network, a folder of its own with one table in it, and a missing metric
is a failure.
"""

from __future__ import annotations

import ast
import builtins
import gc
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.evaluate.table import TableError, check_rows

QUESTIONS = "questions.txt"
"""File of the work folder with the number of questions."""
UNUSABLE = 3
"""Exit code about a table that cannot be used; the last line of the log says why."""
DENIED: list[str] = []
"""What VLMEvalKit wanted of the network, for the message about a missing score."""


def guard() -> None:
    """No network in this process, and ``eval`` reads literals only where VLMEvalKit calls it. For good."""
    python_eval = builtins.eval

    def literal_in_vlmeval(source: Any, *scopes: Any, **more: Any) -> Any:
        caller = sys._getframe(1)
        if str(caller.f_globals.get("__name__", "")).split(".")[0] == "vlmeval":
            return ast.literal_eval(source)
        if scopes or more:
            return python_eval(source, *scopes, **more)
        return python_eval(source, caller.f_globals, caller.f_locals)

    def offline(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.getaddrinfo" or (event == "socket.connect" and isinstance(arguments[1], tuple)):
            DENIED.append(str(arguments[0] if event == "socket.getaddrinfo" else arguments[1][0]))
            raise PermissionError(f"evaluation is offline; {DENIED[-1]} was not asked")

    builtins.eval = literal_in_vlmeval
    sys.addaudithook(offline)


def build(job: dict[str, Any]) -> Any:
    """VLMEvalKit's data set, its table checked. Raises TableError."""
    from vlmeval.dataset import build_dataset

    try:
        dataset = build_dataset(job["data"])
    except Exception as error:  # whatever pandas and VLMEvalKit raise on a table that is none
        raise TableError(f"VLMEvalKit cannot use {job['data']}.tsv: {type(error).__name__}: {error}") from error
    if dataset is None:
        raise TableError(f"VLMEvalKit cannot use {job['data']}.tsv: it has no column 'question'")
    if dataset.MODALITY == "VIDEO" or dataset.TYPE == "MT":
        raise TableError(f"{job['data']} has videos or several turns; only data sets of pictures and text are evaluated")
    if job["limit"]:
        dataset.data = dataset.data.iloc[: job["limit"]]
    rows = dataset.data[[name for name in ("index", "image", "image_path") if name in dataset.data]]
    check_rows(rows.to_dict("records"), Path(job["root"]), job["settings"]["largest_picture"])
    return dataset


def answer_share(job: dict[str, Any], rank: int) -> None:
    """Writes what this worker's questions are answered by each checkpoint, and logits on the first worker."""
    import torch

    from toolkit.evaluate.model import Checkpoint

    dataset = build(job)
    if rank == 0:
        (Path(job["work"]) / QUESTIONS).write_text(str(len(dataset.data)))
    share = range(rank, len(dataset.data), job["processes"])
    roots = [Path(job["root"]), Path(os.environ["LMUData"])]
    for name, folder in job["checkpoints"].items():
        work = Path(job["work"]) / name
        model = Checkpoint(Path(folder), job["settings"], roots)
        if rank == 0:
            _write_logits(work, [model.logits(prompt) for prompt in _prompts(dataset, range(job["logit_questions"]))])
        with (work / f"answers_{rank:03d}.jsonl").open("w", encoding="utf-8", buffering=1) as file:
            for number, prompt in zip(share, _prompts(dataset, share), strict=True):
                row = dataset.data.iloc[number]
                line = {
                    "number": number,
                    "index": str(row["index"]),
                    "question": "\n".join(str(part["value"]) for part in prompt if part["type"] == "text"),
                    "images": [str(part["value"]) for part in prompt if part["type"] == "image"],
                    "expected": str(row.get("answer", "")),
                    "answer": model.answer(prompt),
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _prompts(dataset: Any, numbers: range) -> Iterator[Any]:
    return (dataset.build_prompt(dataset.data.iloc[number]) for number in numbers if number < len(dataset.data))


def _write_logits(work: Path, measured: list[dict[str, Any]]) -> None:
    from safetensors.torch import save_file

    save_file({str(i): one.pop("last").contiguous() for i, one in enumerate(measured)}, work / "logits.safetensors")
    (work / "logits.json").write_text(json.dumps(measured))


def read_answers(work: Path) -> list[dict[str, Any]]:
    """All workers' lines of one checkpoint, in the order of the table."""
    lines = [json.loads(line) for file in sorted(work.glob("answers_*.jsonl")) for line in file.open(encoding="utf-8")]
    return sorted(lines, key=lambda line: line["number"])


def score(job: dict[str, Any]) -> None:
    """Lets VLMEvalKit judge all answers of all checkpoints."""
    dataset = build(job)
    for name in job["checkpoints"]:
        answers = {line["index"]: line["answer"] for line in read_answers(Path(job["work"]) / name)}
        finished = {index: answers[str(index)] for index in dataset.data["index"] if str(index) in answers}
        # Where infer_data of VLMEvalKit keeps the answers of rank 0 of 1; when all are there it builds no model.
        with (Path(job["work"]) / name / f"01_{job['data']}.pkl").open("wb") as file:
            pickle.dump(finished, file)
    sys.argv = ["vlmeval", "--data", job["data"], "--model", *job["checkpoints"], "--work-dir", job["work"]]
    sys.argv += ["--judge", job["judge"], *(["--limit", str(job["limit"])] if job["limit"] else [])]
    from vlmeval import run

    run.main()
    if DENIED:
        print(f"wanted of the network, and refused: {', '.join(sorted(set(DENIED)))}", flush=True)


def main(path: str, part: str) -> None:
    guard()
    job = json.loads(Path(path).read_text())
    try:
        if part != "score":
            answer_share(job, int(part))
        if part == "score" or job["processes"] == 1:  # one process does both: VLMEvalKit takes 8 s to import
            score(job)
    except TableError as error:
        print(error, flush=True)
        sys.exit(UNUSABLE)


if __name__ == "__main__":
    main(*sys.argv[1:])
