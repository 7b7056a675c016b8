"""Starts VLMEvalKit once for many questions: reads cases as JSON from stdin and prints a JSON
object of answers.

It runs confined, like a worker, with a fresh folder as its only argument.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any


def said_about(job: dict[str, Any], number: int) -> str:
    """A worker's answer when it opens a data set: the number of questions, or why it does not."""
    from toolkit.evaluate.early import copy_tables
    from toolkit.evaluate.worker import TableError, build, sources_of

    work = Path(job["work"]) / str(number)
    os.environ["LMUData"] = str(work / "data")
    (work / "data").mkdir(parents=True)
    copy_tables(job["data"], Path(job["root"]), work / "tables")
    job = job | {"work": str(work)}
    try:
        return str(len(build(job, sources_of(job)).data))
    except TableError as error:
        return " ".join(str(error).split())


def ends_with(job: dict[str, Any]) -> tuple[Any, str]:
    """The exit code of a whole worker, and the last line that it prints."""
    from toolkit.evaluate import worker
    from toolkit.evaluate.early import copy_tables

    work = Path(job["work"])
    os.environ["LMUData"] = str(work / "data")
    (work / "data").mkdir()
    copy_tables(job["data"], Path(job["root"]), work / "tables")
    (work / "job.json").write_text(json.dumps(job))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            worker.main(str(work / "job.json"), "0")
    except SystemExit as error:
        return error.code, printed.getvalue().splitlines()[-1]
    return None, printed.getvalue()


def score(job: dict[str, Any], answers: dict[str, list[Any]]) -> None:
    """Lets VLMEvalKit score answers that checkpoints may have given."""
    from toolkit.evaluate import worker
    from toolkit.evaluate.early import copy_tables

    work = Path(job["work"])
    os.environ["LMUData"] = str(work / "data")
    (work / "data").mkdir()
    copy_tables(job["data"], Path(job["root"]), work / "tables")
    for name, given in answers.items():
        (work / name).mkdir()
        lines = [{"number": i, "index": str(i + 1), "answer": answer} for i, answer in enumerate(given)]
        (work / name / "answers_000.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sources = worker.sources_of(job)
    worker.score(job, worker.build(job, sources), sources)


def main(folder: Path) -> dict[str, Any]:
    asked = json.loads(sys.stdin.read())
    answers: dict[str, Any] = {}

    from vlmeval.smp import istype

    from tests.toolkit.vlmeval_names import names

    answers["names"] = names()
    istype(asked["expression"], int)  # VLMEvalKit by itself: it executes the cell
    answers["executed"] = Path(asked["mark"]).exists()
    Path(asked["mark"]).unlink()

    from toolkit.evaluate.cage import guard

    guard(folder)
    from toolkit.evaluate.vlmevalkit import accept_tables

    answers["published"] = sorted(accept_tables())
    answers["said"] = [said_about(job, number) for number, job in enumerate(asked["cases"])]
    score(asked["unjudged"], asked["unjudged"]["answers"])
    answers["worker"] = ends_with(asked["worker"])  # last: it reads no pickles of other folders from then on
    return answers


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = main(Path(sys.argv[1]))
    print(json.dumps(found))
