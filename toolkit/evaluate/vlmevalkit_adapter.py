"""The process that runs VLMEvalKit: ``python -m toolkit.evaluate.vlmevalkit_adapter JOB.json [RANK]``.

It registers the checkpoints of a job as models of VLMEvalKit and calls VLMEvalKit's own program. The answers
are also recorded in files of this project, and a recorded question is not asked again. So several processes
can share the questions, and an interrupted evaluation continues.
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
QUESTION_COUNT_FILE = "questions.txt"
"""File in the work folder with the number of questions; each turn of a dialogue is one."""
UNUSABLE_EXIT_CODE = 3
"""Exit code for a data set that cannot be used; the last line of the log gives the reason."""


class VlmEvalKitModel:
    """A checkpoint as a model of VLMEvalKit.

    Args:
        rank: answer only every ``processes``-th row, beginning with this one; None: all.
        rows: rows of the data set, column -> cell.
    """

    VIDEO_LLM = True  # videos are given as videos, not as pictures

    def __init__(
        self, job: dict[str, Any], model_name: str, rank: int | None, rows: list[dict[str, Any]]
    ) -> None:
        self.evaluation_job = job
        self.model_name = model_name
        self.rank = rank
        self.dataset_rows = rows
        self.answers_dir = Path(job["work"]) / model_name
        self.recorded_answers = {line["number"]: line for line in read_answers(self.answers_dir)}
        answers_path = self.answers_dir / f"answers_{time.time_ns()}_{rank}.jsonl"
        self.answers_file = answers_path.open("w", encoding="utf-8", buffering=1)
        self.question_number = -1
        self.row_number = -1
        self.checkpoint_model: Any = None
        # VLMEvalKit sets one of them to what the name of a video set says, and the other to None.
        self.nframe: int | None = 1
        self.fps: float | None = 1.0

    def set_dump_image(self, _: Any) -> None:
        """Part of VLMEvalKit's interface, for models that make their own prompts."""

    def generate(self, message: list[dict[str, Any]], dataset: str | None = None) -> str:
        """The answer to a prompt or to the last turn of a dialogue; empty if another process answers it."""
        self.question_number += 1
        self.row_number += "content" not in message[0] or len(message) == 1
        if self.question_number in self.recorded_answers:
            return self.recorded_answers[self.question_number]["answer"]
        if self.rank is not None and self.row_number % self.evaluation_job["processes"] != self.rank:
            return ""
        try:
            line = self._answer_question([self._with_frame_settings(part) for part in message])
        except Exception:  # VLMEvalKit would catch it and go on
            traceback.print_exc()
            sys.exit(1)
        self.answers_file.write(json.dumps(line, ensure_ascii=False) + "\n")
        return line["answer"]

    chat = chat_inner = generate

    def _with_frame_settings(self, message_part: dict[str, Any]) -> dict[str, Any]:
        """A video part with the frame settings of its data set's name, unless it has its own.

        Names of data sets end in ``_8frame`` or ``_1fps``.
        """
        if message_part.get("type") != "video" or "nframes" in message_part or "fps" in message_part:
            return message_part
        if self.nframe:
            return message_part | {"nframes": self.nframe}
        return message_part | {"fps": self.fps} if self.fps else message_part

    def _answer_question(self, prompt: list[dict[str, Any]]) -> dict[str, Any]:
        """A question, its answer, what was thought before it, and for the first ones their logits."""
        from safetensors.torch import save_file

        from toolkit.evaluate.checkpoint_model import CheckpointModel, prompt_turns

        if self.checkpoint_model is None:
            gc.collect()  # the checkpoint before this one
            checkpoint_dir = self.evaluation_job["checkpoints"][self.model_name]
            model_settings = self.evaluation_job["settings"]
            self.checkpoint_model = CheckpointModel(
                Path(checkpoint_dir), model_settings, [Path(root) for root in self.evaluation_job["roots"]]
            )

        model_reply = self.checkpoint_model.generate_answer(prompt)
        values_by_type: dict[str, list[str]] = {"text": [], "image": [], "video": []}
        for part in prompt_turns(prompt)[-1]["content"]:
            values_by_type[part["type"]].append(str(part["value"]))
        line = {
            "number": self.question_number,
            "index": str(self.dataset_rows[self.row_number]["index"]),
            "question": "\n".join(values_by_type["text"]),
            "images": values_by_type["image"],
            "videos": values_by_type["video"],
            "expected": str(self.dataset_rows[self.row_number].get("answer", "")),
            "answer": model_reply.answer_text,
            "thinking": model_reply.thinking_text,
            "unanswered": int(not model_reply.is_block_closed),
        }
        if self.question_number < self.evaluation_job["logit_questions"]:
            logit_facts = self.checkpoint_model.logit_digests(prompt)
            logit_tensors = {"last": logit_facts.pop("last").contiguous()}
            save_file(logit_tensors, self.answers_dir / f"logits_{self.question_number}.safetensors")
            line["logits"] = logit_facts
        return line


def read_answers(answers_dir: Path) -> list[dict[str, Any]]:
    """The lines that all processes wrote for one checkpoint, in the order of the questions."""
    lines = {}
    for answers_path in answers_dir.glob("answers_*.jsonl"):
        for line_text in answers_path.read_text(encoding="utf-8").split("\n"):
            with suppress(json.JSONDecodeError):  # the end of an interrupted process
                line = json.loads(line_text)
                lines[line["number"]] = line
    return [lines[number] for number in sorted(lines)]


def first_rows(data_frame: Any, row_limit: int) -> Any:
    """The first rows of a table; for several tables in one, the same number from each."""
    if "SUB_DATASET" not in data_frame:
        return data_frame.iloc[:row_limit]
    num_tables = data_frame["SUB_DATASET"].nunique()
    if row_limit < num_tables:
        _exit_unusable(
            f"--limit {row_limit} is less than one question of "
            f"each of the {num_tables} tables of this data set"
        )
    row_order = data_frame.groupby("SUB_DATASET").cumcount()
    return data_frame.iloc[sorted(row_order.to_numpy().argsort(kind="stable")[:row_limit])]


def _exit_unusable(why: str) -> NoReturn:
    print(" ".join(why.split()), flush=True)
    sys.exit(UNUSABLE_EXIT_CODE)


def _no_judge(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "a language model scores this data set: run one on this machine and give --judge NAME "
        "--judge-base-url http://localhost:PORT/v1, or skip the scores with --no-scores"
    )


def _read_dataset(job: dict[str, Any], build_dataset: Any) -> Any:
    """VLMEvalKit's data set, cut to ``--limit``."""
    dataset_name = job["data"]
    advice = (
        f"put {dataset_name}.tsv, as published, into --lmu-data, or a set of videos into Hugging Face's cache"
    )
    try:
        dataset = build_dataset(dataset_name)
    except Exception as error:
        _exit_unusable(
            f"--data {dataset_name}: VLMEvalKit cannot use it, "
            f"and nothing is downloaded ({advice}): {error!r}"
        )
    if dataset is None:
        _exit_unusable(
            f"--data {dataset_name}: VLMEvalKit knows no such "
            "data set, and finds no table with a column question"
        )
    if getattr(dataset, "pack", False):
        _exit_unusable(
            f"--data {dataset_name}: VLMEvalKit asks several questions at once only of APIs; give ..._nopack"
        )
    if not dataset.data["index"].is_unique:  # it would ask one of them and take its answer for both
        duplicate_index = dataset.data["index"][dataset.data["index"].duplicated()].iloc[0]
        _exit_unusable(f"--data {dataset_name}: index {duplicate_index} occurs twice")

    if job["limit"]:
        dataset.data = first_rows(dataset.data, job["limit"])
    return dataset


def run_vlmevalkit(job: dict[str, Any], rank: int | None) -> None:
    """Runs VLMEvalKit's program on all checkpoints. With a rank, it only answers this rank's share."""
    try:
        from vlmeval import api, config, run
    except ImportError as error:
        install_hint = "; install libGL (Debian: apt install libgl1)" if "libGL" in str(error) else ""
        _exit_unusable(f"VLMEvalKit cannot be imported: {error}{install_hint}")
    if job["judge"] == NO_JUDGE:
        api.OpenAIWrapper = _no_judge  # unjudged answers would count as zero

    vlmevalkit_build = run.build_dataset

    # VLMEvalKit passes arguments to video sets that these do not accept, and they do not know --limit.
    def build_dataset(*_: Any, **__: Any) -> Any:
        dataset = _read_dataset(job, vlmevalkit_build)
        rows = dataset.data.to_dict("records")
        num_questions = (
            sum(len(dataset.build_prompt(row)) // 2 for row in rows) if dataset.TYPE == "MT" else len(rows)
        )
        (Path(job["work"]) / QUESTION_COUNT_FILE).write_text(str(num_questions))
        for name in job["checkpoints"]:
            config.supported_VLM[name] = partial(VlmEvalKitModel, job, name, rank, rows)
        random.seed(0)  # some data sets draw: the same for all checkpoints
        return dataset

    run.build_dataset = build_dataset
    with_scores = rank is None and job["scores"]
    # A set of several tables replaces its own name by theirs in the path of its results, in folders too.
    sys.argv = ["vlmeval", "--data", job["data"], "--model", *job["checkpoints"], "--judge", job["judge"]]
    sys.argv += ["--work-dir", f"../results_{'all' if rank is None else rank}"]
    sys.argv += ["--mode", "all" if with_scores else "infer"]
    if job["judge_url"]:
        judge_key = os.environ.get("OPENAI_API_KEY") or "none"
        sys.argv += ["--judge-base-url", job["judge_url"], "--judge-key", judge_key]
    run.main()


if __name__ == "__main__":
    run_vlmevalkit(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]) if sys.argv[2:] else None)
