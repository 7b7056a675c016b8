"""The process that runs VLMEvalKit: ``python -m toolkit.evaluate.vlmevalkit_adapter JOB.json``.

It registers the checkpoints of a job as models of VLMEvalKit and calls VLMEvalKit's own program, which asks,
shares the questions between processes under torchrun, goes on after an interruption, and scores.
"""

import gc
import hashlib
import json
import math
import os
import random
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

NO_JUDGE = "exact_matching"
QUESTION_COUNT_FILE = "questions.txt"
"""File in the work folder with the number of questions; each turn of a dialogue is one."""
UNUSABLE_FILE = "unusable.txt"
"""File in the work folder with the reason why a data set cannot be used."""


class VlmEvalKitModel:
    """A checkpoint as a model of VLMEvalKit. Records its answers."""

    VIDEO_LLM = True  # videos are given as videos, not as images

    def __init__(self, job: dict[str, Any], model_name: str) -> None:
        from toolkit.evaluate.checkpoint_model import CheckpointModel

        gc.collect()  # the checkpoint before this one
        record_dir = Path(job["work"]) / "results" / model_name
        record_dir.mkdir(parents=True, exist_ok=True)
        self.model = CheckpointModel(
            Path(job["checkpoints"][model_name]), job["settings"], [Path(root) for root in job["roots"]]
        )
        answers_path = record_dir / f"answers_{os.environ.get('RANK', '0')}.jsonl"
        self.answers_file = answers_path.open("a", encoding="utf-8", buffering=1)
        # VLMEvalKit sets one of them to what the name of a video set says, and the other to None.
        self.nframe: int | None = 1
        self.fps: float | None = 1.0

    def set_dump_image(self, _: Any) -> None:
        """Part of VLMEvalKit's interface, for models that make their own prompts."""

    def generate(self, message: list[dict[str, Any]], dataset: str | None = None) -> str:
        try:
            return self._answer([self._with_frame_settings(part) for part in message])
        except Exception:  # VLMEvalKit would catch it and go on
            traceback.print_exc()
            sys.exit(1)

    chat = chat_inner = generate

    def _with_frame_settings(self, message_part: dict[str, Any]) -> dict[str, Any]:
        """A video part with the frames that its data set's name states, unless it has its own."""
        if message_part.get("type") != "video" or "nframes" in message_part or "fps" in message_part:
            return message_part
        settings = {"nframes": self.nframe} if self.nframe else {"fps": self.fps} if self.fps else {}
        return message_part | settings

    def _answer(self, prompt: list[dict[str, Any]]) -> str:
        from toolkit.evaluate.checkpoint_model import prompt_turns

        reply, _ = self.model.answerer.answer(self.model.encode(prompt))
        parts = prompt_turns(prompt)[-1][1]
        line = {
            "key": hashlib.sha256(json.dumps(prompt, default=str, sort_keys=True).encode()).hexdigest()[:16],
            "question": "\n".join(str(part["value"]) for part in parts if part["type"] == "text"),
            "media": [str(part["value"]) for part in parts if part["type"] != "text"],
            "answer": reply.answer_text,
            "thinking": reply.thinking_text,
            "unanswered": int(not reply.is_block_closed),
        }
        self.answers_file.write(json.dumps(line, ensure_ascii=False) + "\n")
        return reply.answer_text


def _refuse(job: dict[str, Any], why: str) -> NoReturn:
    (Path(job["work"]) / UNUSABLE_FILE).write_text(" ".join(why.split()))
    sys.exit(1)


def _no_judge(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "a language model scores this data set: run one on this machine and give --judge "
        "NAME@http://localhost:PORT/v1"
    )


def _read_dataset(job: dict[str, Any], build_dataset: Any) -> Any:
    """VLMEvalKit's data set, cut to ``--limit``: the same number of questions from each table of several."""
    refuse = partial(_refuse, job)
    named = f"--data {job['data']}"
    try:
        dataset = build_dataset(job["data"])
    except Exception as error:
        refuse(
            f"{named}: VLMEvalKit cannot use it, and nothing is downloaded (put {job['data']}.tsv, as"
            f" published, into $LMUData, or a set of videos into Hugging Face's cache): {error!r}"
        )
    if dataset is None:
        refuse(f"{named}: VLMEvalKit knows no such data set, and finds no table with a column question")
    if getattr(dataset, "pack", False):
        refuse(f"{named}: VLMEvalKit asks several questions at once only of APIs; give ..._nopack")
    index = dataset.data["index"]
    if not index.is_unique:  # it would ask one of them and take its answer for both
        refuse(f"{named}: index {index[index.duplicated()].iloc[0]} occurs twice")
    if {"A", "B"} <= set(dataset.data) and "answer" not in dataset.data:
        refuse(f"{named}: multiple choice without a column answer cannot be scored")

    if limit := job["settings"]["limit"]:
        rows = dataset.data
        tables = rows.groupby("SUB_DATASET" if "SUB_DATASET" in rows else [0] * len(rows))
        dataset.data = tables.head(math.ceil(limit / tables.ngroups))
    return dataset


def run_vlmevalkit(job: dict[str, Any]) -> None:
    try:
        from vlmeval import api, config, run
    except ImportError as error:
        install_hint = "; install libGL (Debian: apt install libgl1)" if "libGL" in str(error) else ""
        _refuse(job, f"VLMEvalKit cannot be imported: {error}{install_hint}")
    import torch.distributed

    if job["settings"]["judge"] == NO_JUDGE:
        api.OpenAIWrapper = _no_judge  # unjudged answers would count as zero
    vlmevalkit_build = run.build_dataset

    # VLMEvalKit passes arguments to video sets that these do not accept, and they do not know --limit.
    def build_dataset(*_: Any, **__: Any) -> Any:
        dataset = _read_dataset(job, vlmevalkit_build)
        num_questions = len(dataset.data)
        if dataset.TYPE == "MT":
            num_questions = sum(len(dataset.build_prompt(r)) // 2 for r in dataset.data.to_dict("records"))
        (Path(job["work"]) / QUESTION_COUNT_FILE).write_text(str(num_questions))
        random.seed(0)  # some data sets draw: the same for all checkpoints
        return dataset

    run.build_dataset = build_dataset
    # VLMEvalKit's processes only wait for each other, which gloo does on machines without GPUs too.
    start_group = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, timeout: start_group("gloo", timeout=timeout)  # type: ignore
    # A set of several tables replaces its own name by theirs in the path of its results, in folders too.
    sys.argv = ["vlmeval", "--data", job["data"], "--model", *job["checkpoints"], "--work-dir", "../results"]
    sys.argv += ["--judge", job["settings"]["judge"]]
    if job["judge_url"]:
        key = os.environ.get("OPENAI_API_KEY") or "none"
        sys.argv += ["--judge-base-url", job["judge_url"], "--judge-key", key]
    for name in job["checkpoints"]:
        config.supported_VLM[name] = partial(VlmEvalKitModel, job, name)
    run.main()


if __name__ == "__main__":
    run_vlmevalkit(json.loads(Path(sys.argv[1]).read_text()))
