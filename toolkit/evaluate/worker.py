"""A process that holds VLMEvalKit and a model: ``python -m toolkit.evaluate.worker JOB.json RANK``.

For each checkpoint, a worker writes the answers to its share of the questions (JSON lines). The first worker
also writes the logits of some prompts (safetensors and JSON). It then scores: it puts all answers where
VLMEvalKit keeps its own unfinished work and lets VLMEvalKit's ``run.py`` continue from there, so that
VLMEvalKit's own code reads the table, judges and writes ``status.json``. A worker first checks the data set
and then waits for a line on its standard input, the checkpoints as JSON; meanwhile they are read. Before it
scores, the first worker waits for a second line, which says that the others are done.

VLMEvalKit catches every exception, so a missing metric counts as a failure. Its ``run.py`` passes arguments
to video sets that do not accept them, and never passes ``--limit``; it therefore receives the data set that
was built here.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.evaluate import cage, vlmevalkit
from toolkit.evaluate.early import is_own, wrong_columns
from toolkit.evaluate.sources import Sources
from toolkit.evaluate.table import REFERENCE, TableError, check_rows, check_video_rows

QUESTIONS = "questions.txt"
"""File in the work folder with the number of questions."""
TABLES = "tables.json"
"""File in the work folder with the checksums of the tables."""
JUDGED = "judge_wanted.txt"
"""File in the work folder with a line for each request to a language-model judge that does not exist."""
UNUSABLE = 3
"""Exit code for an unusable table; the last line of the log gives the reason."""


def sources_of(job: dict[str, Any]) -> Sources:
    """The files of a job's data set, in this process' own ``$LMUData``."""
    return Sources(job["data"], Path(job["root"]), Path(job["work"]) / "tables", Path(os.environ["LMUData"]))


def build(job: dict[str, Any], sources: Sources) -> Any:
    """Builds VLMEvalKit's data set from local files after checking its table. Raises TableError."""
    from vlmeval.dataset import build_dataset

    name = job["data"]
    largest = job["settings"]["largest_picture"]
    own = is_own(name)
    for part in sources.parts if own or sources.kind == "tables" else []:
        rows = _read_table(sources.data / f"{part}.tsv")
        if own:
            check_own(rows, name, job["scores"])
        # Before the data set is built, because that writes the pictures.
        check_rows(rows, sources.root, largest, part)

    vlmevalkit.install(sources)
    try:
        dataset = build_dataset(name)
    except TableError:
        raise
    except Exception as error:  # pandas and VLMEvalKit raise anything on a broken table
        what = "; ".join(
            filter(
                None,
                [
                    f"{type(error).__name__}: {vlmevalkit.real(sources, str(error))}",
                    vlmevalkit.missing(sources),
                ],
            )
        )
        raise TableError(f"VLMEvalKit cannot use {name}: {what}") from error

    if dataset is None:
        raise TableError(f"VLMEvalKit cannot use {name}.tsv: it has no column 'question'")
    if getattr(dataset, "pack", False):
        raise TableError(
            f"{name} asks all questions about a video at once, which VLMEvalKit supports only for APIs; "
            "give ..._nopack"
        )

    if job["limit"]:
        dataset.data = first_rows(dataset.data, job["limit"])
    rows = dataset.data.to_dict("records")
    if sources.kind == "video":
        check_video_rows(rows, sources.data)
    elif sources.kind == "table" and not own:
        check_rows(rows, sources.root, largest, name)

    _check_media(dataset, job, sources)
    return dataset


def _read_table(path: Path) -> list[dict[str, Any]]:
    from vlmeval.smp import load

    try:
        return load(str(path)).to_dict("records")
    except Exception as error:
        raise TableError(f"{path.name} is not a table: {type(error).__name__}: {error}") from error


def check_own(rows: list[dict[str, Any]], name: str, scored: bool) -> None:
    """Raises TableError where VLMEvalKit would fail on a user's own table with a bare
    KeyError or AssertionError.

    Args:
        rows: column -> cell, as in the file.
        scored: multiple choice will be scored, which needs the column ``answer``.
    """
    if problem := wrong_columns(list(map(str, rows[0])) if rows else [], scored):
        raise TableError(f"{name}.tsv: {problem}")
    indices = {str(row.get("index")) for row in rows}
    for number, row in enumerate(rows, 1):
        image = row.get("image")
        short = isinstance(image, str) and 0 < len(image) <= REFERENCE and not image.startswith("[")
        if short and image not in indices:
            raise TableError(
                f"{name}.tsv: row {number}: column image: {image!r} is neither a picture in base64 nor the "
                "index of a row that has one; put paths of pictures into a column image_path"
            )


def first_rows(data: Any, limit: int) -> Any:
    """The first rows of a table; for several tables in one, the same number from each.

    Raises:
        TableError: one of the tables would have no rows.
    """
    if "SUB_DATASET" not in data:
        return data.iloc[:limit]
    parts = data["SUB_DATASET"].nunique()
    if limit < parts:
        raise TableError(
            f"--limit {limit} is less than one question of each of the {parts} tables of this data set"
        )
    order = data.groupby("SUB_DATASET").cumcount()
    return data.iloc[sorted(order.to_numpy().argsort(kind="stable")[:limit])]


def _check_media(dataset: Any, job: dict[str, Any], sources: Any) -> None:
    """Raises TableError, naming the first missing video, before a model is loaded."""
    if dataset.MODALITY != "VIDEO":
        return

    slow = any(
        getattr(dataset, name, False)
        for name in ("use_subtitle", "with_subtitle", "load_into_video_and_process")
    )
    for prompt in _prompts(dataset, range(1 if slow else len(dataset.data))):
        for part in prompt:
            if part["type"] not in ("text", "image", "video") or not isinstance(part["value"], str):
                raise TableError(
                    f"{job['data']} gives {part['type']}; these models take text, and pictures and videos "
                    "from files"
                )
            if part["type"] != "text" and not Path(part["value"]).is_file():
                path = vlmevalkit.real(sources, part["value"])
                raise TableError(f"--data {job['data']}: {path} is missing or leads outside its folder")


def answer_share(job: dict[str, Any], rank: int, dataset: Any, roots: list[Path]) -> None:
    """Writes each checkpoint's answers to this worker's questions; the first worker also writes logits."""
    import torch

    from toolkit.evaluate.model import Checkpoint

    share = range(rank, len(dataset.data), job["processes"])
    for name, folder in job["checkpoints"].items():
        work = Path(job["work"]) / name
        settings = job["settings"]
        model = Checkpoint(Path(folder), settings | settings["video_rules"].get(folder, {}), roots)
        if rank == 0:
            _write_logits(
                work, [model.logits(prompt) for prompt in _prompts(dataset, range(job["logit_questions"]))]
            )

        with (work / f"answers_{rank:03d}.jsonl").open("w", encoding="utf-8", buffering=1) as file:
            for number, prompt in zip(share, _prompts(dataset, share), strict=True):
                line = {"number": number} | _line(dataset.data.iloc[number], prompt, model)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _line(row: Any, prompt: Any, model: Any) -> dict[str, Any]:
    """A question, its answer and what was thought before it; for a dialogue, the lists of all of them.

    ``unanswered`` counts the answers that never came because the model was still thinking.
    """
    from toolkit.evaluate.model import is_dialogue, turns

    of_user = [turn for turn in turns(prompt) if turn["role"] == "user"]
    parts = [part for turn in of_user for part in turn["content"]]
    dialogue = is_dialogue(prompt)
    said = model.dialogue(prompt) if dialogue else [model.answer(prompt)]
    return {
        "index": str(row["index"]),
        "question": "\n".join(str(part["value"]) for part in parts if part["type"] == "text"),
        "images": [str(part["value"]) for part in parts if part["type"] == "image"],
        "videos": [str(part["value"]) for part in parts if part["type"] == "video"],
        "expected": str(row.get("answer", "")),
        "answer": [one.answer for one in said] if dialogue else said[0].answer,
        "thinking": [one.thinking for one in said] if dialogue else said[0].thinking,
        "unanswered": sum(not one.closed for one in said),
    }


def _prompts(dataset: Any, numbers: range) -> Iterator[Any]:
    """VLMEvalKit's own prompts, with native videos where a data set has them, as for its Qwen-VL
    models. Raises TableError."""
    for number in numbers:
        if number >= len(dataset.data):
            return
        random.seed(number)  # VDC draws its question; all checkpoints must get the same one
        if dataset.MODALITY != "VIDEO":
            yield dataset.build_prompt(dataset.data.iloc[number])
            continue
        try:
            prompt = dataset.build_prompt(number, video_llm=True)
        except ImportError as error:  # MoviePy, which VLMEvalKit does not declare
            raise TableError(f"VLMEvalKit cannot make a prompt of row {number + 1}: {error}") from error
        if prompt is None:
            raise TableError(f"VLMEvalKit makes no prompt of row {number + 1}")
        yield [_sampled(part, dataset) for part in prompt]


def _sampled(part: dict[str, Any], dataset: Any) -> dict[str, Any]:
    """A video with the frame settings of its data set's name (``_8frame``, ``_1fps``), unless it
    has its own."""
    if part["type"] != "video" or "nframes" in part or "fps" in part:
        return part
    if dataset.nframe > 0:
        return part | {"nframes": dataset.nframe}
    return part | {"fps": dataset.fps} if dataset.fps > 0 else part


def _write_logits(work: Path, measured: list[dict[str, Any]]) -> None:
    from safetensors.torch import save_file

    save_file(
        {str(i): one.pop("last").contiguous() for i, one in enumerate(measured)}, work / "logits.safetensors"
    )
    (work / "logits.json").write_text(json.dumps(measured))


def read_answers(work: Path) -> list[dict[str, Any]]:
    """The lines of all workers for one checkpoint, in the order of the table."""
    lines = [
        json.loads(line)
        for file in sorted(work.glob("answers_*.jsonl"))
        for line in file.open(encoding="utf-8")
    ]
    return sorted(lines, key=lambda line: line["number"])


def score(job: dict[str, Any], dataset: Any, sources: Sources) -> None:
    """Lets VLMEvalKit judge all answers of all checkpoints."""
    from vlmeval import run
    from vlmeval.smp import get_pred_file_path

    work = Path(job["work"])
    for name in job["checkpoints"]:
        answers = {line["index"]: line["answer"] for line in read_answers(work / name)}
        finished = {index: answers[str(index)] for index in dataset.data["index"] if str(index) in answers}
        # VLMEvalKit keeps the answers of rank 0 of 1 in this file; if all answers are there, it builds
        # no model.
        stem = (
            job["data"]
            if dataset.MODALITY != "VIDEO"
            else Path(get_pred_file_path(".", name, job["data"])).stem
        )
        with (work / name / f"01_{stem}.pkl").open("wb") as file:
            pickle.dump(finished, file)

    run.build_dataset = lambda *_, **__: _fresh(dataset, job, sources)
    if job["judge"] == vlmevalkit.NO_JUDGE:
        vlmevalkit.without_judge(work / JUDGED)
    # A set of several tables replaces its own name by theirs, anywhere in the path of its results.
    os.chdir(work)
    sys.argv = [
        "vlmeval",
        "--data",
        job["data"],
        "--model",
        *job["checkpoints"],
        "--work-dir",
        ".",
        "--judge",
        job["judge"],
    ]

    if job["judge_url"]:
        sys.argv += [
            "--judge-base-url",
            job["judge_url"],
            "--judge-key",
            os.environ.get("OPENAI_API_KEY") or "none",
        ]

    run.main()
    if cage.DENIED:
        print(f"refused network connections: {', '.join(sorted(set(cage.DENIED)))}", flush=True)


def _fresh(dataset: Any, job: dict[str, Any], sources: Sources) -> Any:
    """A copy of the data set that VLMEvalKit may change while it scores one checkpoint."""
    # Some data sets draw an option where an answer has none: the same one for all checkpoints.
    random.seed(0)
    try:
        return copy.deepcopy(dataset)
    except TypeError:  # the data set holds something that cannot be copied
        return build(job, sources)


def run_job(job: dict[str, Any], rank: int) -> None:
    """Does the work of one worker. Raises TableError."""
    work = Path(job["work"])
    sources = sources_of(job)
    dataset = build(job, sources)
    if rank == 0:
        (work / QUESTIONS).write_text(str(len(dataset.data)))
        (work / TABLES).write_text(json.dumps(vlmevalkit.checksums(sources.tables)))
    said = sys.stdin.readline()
    if not said:
        return  # an earlier gate failed
    job = job | {"checkpoints": json.loads(said)}
    answer_share(job, rank, dataset, sources.folders)
    if rank == 0 and job["scores"] and sys.stdin.readline():
        score(job, dataset, sources)


def main(path: str, rank: str) -> None:
    job = json.loads(Path(path).read_text())
    cage.guard(Path(job["work"]), job["judge_url"])
    try:
        vlmevalkit.check_import()
        run_job(job, int(rank))
    except (TableError, vlmevalkit.NotInstalled) as error:
        print(" ".join(str(error).split()), flush=True)
        sys.exit(UNUSABLE)


if __name__ == "__main__":
    main(*sys.argv[1:])
