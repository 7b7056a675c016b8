"""The process that runs VLMEvalKit: ``python -m toolkit.evaluate.adapter JOB.json [RANK]``.

It registers the checkpoints of a job as models of VLMEvalKit and calls VLMEvalKit's own program. What a
checkpoint answers is recorded beside, so that several processes can share the questions, and an interrupted
evaluation goes on: a recorded question is not asked again.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

NO_JUDGE = "exact_matching"
QUESTIONS = "questions.txt"
"""File in the work folder with the number of questions; each turn of a dialogue is one."""
UNUSABLE = 3
"""Exit code for a data set that cannot be used; the last line of the log gives the reason."""


class Adapter:
    """A checkpoint as a model of VLMEvalKit.

    Args:
        rank: answer only every ``processes``-th row, beginning with this one; None: all.
        rows: rows of the data set, column -> cell.
    """

    VIDEO_LLM = True  # videos are given as videos, not as pictures

    def __init__(self, job: dict[str, Any], name: str, rank: int | None, rows: list[dict[str, Any]]) -> None:
        self.job = job
        self.name = name
        self.rank = rank
        self.rows = rows
        self.work = Path(job["work"]) / name
        self.recorded = {line["number"]: line for line in read_answers(self.work)}
        path = self.work / f"answers_{time.time_ns()}_{rank}.jsonl"
        self.file = path.open("w", encoding="utf-8", buffering=1)
        self.number = -1
        self.row = -1
        self.checkpoint: Any = None
        # VLMEvalKit sets one of them to what the name of a video set says, and the other to None.
        self.nframe: int | None = 1
        self.fps: float | None = 1.0

    def set_dump_image(self, _: Any) -> None:
        """Part of VLMEvalKit's interface, for models that make their own prompts."""

    def generate(self, message: list[dict[str, Any]], dataset: str | None = None) -> str:
        """The answer to a prompt or to the last turn of a dialogue; empty if another process answers it."""
        self.number += 1
        self.row += "content" not in message[0] or len(message) == 1
        if self.number in self.recorded:
            return self.recorded[self.number]["answer"]
        if self.rank is not None and self.row % self.job["processes"] != self.rank:
            return ""
        try:
            line = self._answered([self._sampled(part) for part in message])
        except Exception:  # VLMEvalKit would catch it and go on
            traceback.print_exc()
            sys.exit(1)
        self.file.write(json.dumps(line, ensure_ascii=False) + "\n")
        return line["answer"]

    chat = chat_inner = generate

    def _sampled(self, part: dict[str, Any]) -> dict[str, Any]:
        """A video with the frame settings of its data set's name (``_8frame``, ``_1fps``), unless it
        has its own."""
        if part.get("type") != "video" or "nframes" in part or "fps" in part:
            return part
        return part | ({"nframes": self.nframe} if self.nframe else {"fps": self.fps} if self.fps else {})

    def _answered(self, prompt: list[dict[str, Any]]) -> dict[str, Any]:
        """A question, its answer, what was thought before it, and for the first ones their logits."""
        from safetensors.torch import save_file

        from toolkit.evaluate.model import Checkpoint, turns

        if self.checkpoint is None:
            gc.collect()  # the checkpoint before this one
            folder = self.job["checkpoints"][self.name]
            settings = self.job["settings"] | self.job["settings"]["video_rules"].get(folder, {})
            self.checkpoint = Checkpoint(Path(folder), settings, [Path(root) for root in self.job["roots"]])

        reply = self.checkpoint.answer(prompt)
        last = turns(prompt)[-1]["content"]
        line = {
            "number": self.number,
            "index": str(self.rows[self.row]["index"]),
            "question": "\n".join(str(part["value"]) for part in last if part["type"] == "text"),
            "images": [str(part["value"]) for part in last if part["type"] == "image"],
            "videos": [str(part["value"]) for part in last if part["type"] == "video"],
            "expected": str(self.rows[self.row].get("answer", "")),
            "answer": reply.answer,
            "thinking": reply.thinking,
            "unanswered": int(not reply.closed),
        }
        if self.number < self.job["logit_questions"]:
            measured = self.checkpoint.logits(prompt)
            tensors = {"last": measured.pop("last").contiguous()}
            save_file(tensors, self.work / f"logits_{self.number}.safetensors")
            line["logits"] = measured
        return line


def read_answers(work: Path) -> list[dict[str, Any]]:
    """The lines that all processes wrote for one checkpoint, in the order of the questions."""
    lines = {}
    for file in work.glob("answers_*.jsonl"):
        for text in file.read_text(encoding="utf-8").split("\n"):
            with suppress(json.JSONDecodeError):  # the end of an interrupted process
                line = json.loads(text)
                lines[line["number"]] = line
    return [lines[number] for number in sorted(lines)]


def first_rows(data: Any, limit: int) -> Any:
    """The first rows of a table; for several tables in one, the same number from each."""
    if "SUB_DATASET" not in data:
        return data.iloc[:limit]
    parts = data["SUB_DATASET"].nunique()
    if limit < parts:
        _unusable(f"--limit {limit} is less than one question of each of the {parts} tables of this data set")
    order = data.groupby("SUB_DATASET").cumcount()
    return data.iloc[sorted(order.to_numpy().argsort(kind="stable")[:limit])]


def _unusable(why: str) -> NoReturn:
    print(" ".join(why.split()), flush=True)
    sys.exit(UNUSABLE)


def _no_judge(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "a language model scores this data set: run one on this machine and give --judge NAME "
        "--judge-base-url http://localhost:PORT/v1, or skip the scores with --no-scores"
    )


def _read_data(job: dict[str, Any], build: Any) -> Any:
    """VLMEvalKit's data set, cut to ``--limit``."""
    name = job["data"]
    advice = f"put {name}.tsv, as published, into --lmu-data, or a set of videos into Hugging Face's cache"
    try:
        dataset = build(name)
    except Exception as error:
        _unusable(f"--data {name}: VLMEvalKit cannot use it, and nothing is downloaded ({advice}): {error!r}")
    if dataset is None:
        _unusable(
            f"--data {name}: VLMEvalKit knows no such data set, and finds no table with a column question"
        )
    if getattr(dataset, "pack", False):
        _unusable(f"--data {name}: VLMEvalKit asks several questions at once only of APIs; give ..._nopack")
    if not dataset.data["index"].is_unique:  # it would ask one of them and take its answer for both
        twice = dataset.data["index"][dataset.data["index"].duplicated()].iloc[0]
        _unusable(f"--data {name}: index {twice} occurs twice")

    if job["limit"]:
        dataset.data = first_rows(dataset.data, job["limit"])
    return dataset


def run_vlmevalkit(job: dict[str, Any], rank: int | None) -> None:
    """Runs VLMEvalKit's program on all checkpoints. With a rank, it only answers this rank's share."""
    try:
        from vlmeval import api, config, run
    except ImportError as error:
        hint = "; install libGL (Debian: apt install libgl1)" if "libGL" in str(error) else ""
        _unusable(f"VLMEvalKit cannot be imported: {error}{hint}")
    if job["judge"] == NO_JUDGE:
        api.OpenAIWrapper = _no_judge  # unjudged answers would count as zero

    vlmevalkit_build = run.build_dataset

    # VLMEvalKit passes arguments to video sets that these do not accept, and they do not know --limit.
    def build_dataset(*_: Any, **__: Any) -> Any:
        dataset = _read_data(job, vlmevalkit_build)
        rows = dataset.data.to_dict("records")
        turns = (
            sum(len(dataset.build_prompt(row)) // 2 for row in rows) if dataset.TYPE == "MT" else len(rows)
        )
        (Path(job["work"]) / QUESTIONS).write_text(str(turns))
        for name in job["checkpoints"]:
            config.supported_VLM[name] = partial(Adapter, job, name, rank, rows)
        random.seed(0)  # some data sets draw: the same for all checkpoints
        return dataset

    run.build_dataset = build_dataset
    scored = rank is None and job["scores"]
    # A set of several tables replaces its own name by theirs in the path of its results, in folders too.
    sys.argv = ["vlmeval", "--data", job["data"], "--model", *job["checkpoints"], "--judge", job["judge"]]
    sys.argv += ["--work-dir", f"../results_{'all' if rank is None else rank}"]
    sys.argv += ["--mode", "all" if scored else "infer"]
    if job["judge_url"]:
        key = os.environ.get("OPENAI_API_KEY") or "none"
        sys.argv += ["--judge-base-url", job["judge_url"], "--judge-key", key]
    run.main()


if __name__ == "__main__":
    run_vlmevalkit(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]) if sys.argv[2:] else None)
