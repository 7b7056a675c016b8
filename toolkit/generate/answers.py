"""``megatron-vl generate``: reads prompts, starts the processes and turns tokens into text."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_tools.formats import Conversation, RecordError, read_prompt
from data_tools.media import check_reference, describe, read_media
from data_tools.records import BadLine, ReadError, is_array, read_records
from megatron_vl.config import DataConfig
from megatron_vl.data.packing.assemble import Sample
from megatron_vl.data.sample.chat import ChatError, stop_tokens
from megatron_vl.data.sample.pixels import PixelError
from megatron_vl.data.sample.thinking import split_thinking
from megatron_vl.errors import UserError
from megatron_vl.spec.layout import make_layout
from megatron_vl.weights.reader import WeightReader
from megatron_vl.weights.video_rule import exported_video_rule, weights_video_rule
from toolkit.launch import end_of, run_group
from toolkit.samples import SampleEncoder, write_samples
from toolkit.trained_rules import follow

from .worker import GenerateJob, write_job

ANSWER, THOUGHT = 128, 2048
"""Default largest number of tokens of an answer, without and with thinking."""
TOLD = 10
"""Number of unusable records that are named; the others are only counted."""

Prompt = tuple[Conversation, Path, str]
"""A conversation, the resolved folder of its media, and its file and line for messages
(empty for --prompt)."""


@dataclass
class GenerateRequest:
    """The options of one call of the command."""

    hf: Path
    checkpoint: Path
    conversations: list[Prompt]
    layout: dict[str, Any] = field(default_factory=dict)
    """Arguments of :func:`megatron_vl.spec.layout.make_layout`."""
    max_new_tokens: int | None = None
    """Largest number of tokens per answer; None: ``ANSWER``, or ``THOUGHT`` if the model thinks."""
    think: bool | None = None
    """Whether the model thinks; None leaves it to the chat template."""
    dtype: str = "float32"
    platform: str = "cpu"
    batch: int = 8
    data: DataConfig = field(default_factory=DataConfig)
    """Limits of pictures and videos."""
    asked_rules: dict[str, str] = field(default_factory=dict)
    """The rules for videos that were asked for, by the fields of ``data``; others are the checkpoint's."""


def run_generate(
    request: GenerateRequest, say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """{"text", "thinking", "tokens", "prompt_tokens", "finished"} of each conversation's next turn.

    ``text`` is what :func:`split_thinking` leaves, ``tokens`` is everything.

    Raises:
        UserError, FileNotFoundError: the processes failed, or the request is impossible.
    """
    reader = WeightReader(request.checkpoint)
    spec = reader.spec
    data = dataclasses.replace(request.data, **video_rules(reader, request.hf, request.asked_rules, say))
    encoder = SampleEncoder(request.hf, data)
    if spec.differences(encoder.spec):
        raise UserError(f"--checkpoint {request.checkpoint} holds a different model than --hf {request.hf}")

    layout = make_layout(spec, **request.layout)
    samples = _encode(encoder, request.conversations, request.think)
    opened = [encoder.begins_by_thinking(sample) for sample in samples]
    most = request.max_new_tokens or (THOUGHT if any(opened) else ANSWER)
    stop = stop_tokens(request.hf, encoder.chat.tokenizer)
    with tempfile.TemporaryDirectory(prefix="megatron-vl-generate-") as folder:
        work = Path(folder)
        write_samples(samples, work / "samples.safetensors")
        job = GenerateJob(
            hf=str(request.hf),
            checkpoint=str(request.checkpoint),
            samples=str(work / "samples.safetensors"),
            layout=request.layout,
            max_new_tokens=most,
            stop=stop,
            dtype=request.dtype,
            platform=request.platform,
            batch=request.batch,
            video_positions=data.video_positions,
        )

        write_job(job, work / "job.json")
        ranks = layout.replica_ranks * layout.least_dp
        say(
            f"{len(samples)} prompts of {sum(map(len, samples))} tokens, {ranks} "
            f"process{'es' if ranks > 1 else ''}"
        )
        done = run_group(
            "toolkit.generate.worker",
            [work / "job.json", work / "answers.json"],
            ranks,
            on_cpu=request.platform == "cpu",
        )
        if done.returncode:
            raise UserError(f"the processes failed:\n{end_of(done)}")

        answers: list[list[int]] = json.loads((work / "answers.json").read_text())

    found = []
    for tokens, sample, begun in zip(answers, samples, opened, strict=True):
        said = split_thinking(encoder.chat.tokenizer.decode(tokens, skip_special_tokens=True), begun)
        finished = tokens[-1] in stop
        found.append(
            {
                "text": said.answer,
                "thinking": said.thinking,
                "tokens": tokens,
                "prompt_tokens": len(sample),
                "finished": finished,
            }
        )
        if not said.closed:
            say(_unanswered(len(found), most, finished))
        elif not finished:
            say(f"answer {len(found)} was cut after {most} tokens; raise --max-new-tokens")
    return found


def _unanswered(number: int, most: int, finished: bool) -> str:
    """What is said of an answer that never came."""
    if finished:
        return f"answer {number} is empty: the model ended its turn while it was thinking"
    return (
        f"answer {number} is empty: the model was still thinking after {most} tokens;"
        " raise --max-new-tokens, or give --thinking off"
    )


def video_rules(
    reader: WeightReader, hf: Path, asked: dict[str, str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Fields of :class:`DataConfig`: the rules asked for, and the one that the checkpoint was trained under.

    A run's checkpoint names its rule, and so do weights that come from one. Otherwise ``hf`` does, if it is
    an export.

    Raises:
        UserError: like :func:`toolkit.trained_rules.follow`.
    """
    folder = reader.path
    trained = weights_video_rule(folder, reader.manifest, reader.spec)
    if not trained:
        folder = hf
        trained = exported_video_rule(hf, reader.spec)
    return follow(folder, trained, asked, say)


def _encode(encoder: SampleEncoder, prompts: list[Prompt], think: bool | None) -> list[Sample]:
    """Encodes the prompts. Raises UserError, which names the prompts that the model cannot take."""
    samples = []
    wrong = _Wrong()
    for conversation, root, source in prompts:
        try:
            media = [(kind, describe(ref), read_media(kind, ref, root)) for kind, ref in conversation.media]
            samples.append(encoder.prompt(conversation.messages, media, conversation.tools, think))
        except (RecordError, ChatError, PixelError) as error:
            wrong.add(source, error)
    wrong.tell()
    return samples


class _Wrong:
    """Collects records that cannot be used."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def add(self, source: str, error: ValueError) -> None:
        self.count += 1
        reason = error.reason if isinstance(error, RecordError) else ""
        said = [part for part in (source, reason if reason != str(error) else "", str(error)) if part]
        if self.count <= TOLD:
            self.lines.append(": ".join(said))

    def tell(self) -> None:
        """Raises UserError if there are any."""
        if self.count == 1:
            raise UserError(self.lines[0])
        if self.count:
            more = [f"and {self.count - TOLD} more"] if self.count > TOLD else []
            raise UserError("\n  ".join([f"{self.count} records cannot be used:", *self.lines, *more]))


def one_conversation(prompt: str, images: list[Path], videos: list[Path]) -> Conversation:
    """Makes a user's turn of pictures, videos, then the text."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": str(path.resolve())} for path in images]
    parts += [{"type": "video", "video": str(path.resolve())} for path in videos]
    return read_prompt(
        {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]}
    )


def read_prompt_files(files: list[tuple[Path, Path]]) -> list[Prompt]:
    """Reads the conversations of JSON or JSON-lines files; leaves out a final assistant turn.

    Args:
        files: each file with the resolved folder of its media.

    Raises:
        UserError: records cannot be used, or their media are missing; the message names the first ten and
            counts all of them.
    """
    prompts: list[Prompt] = []
    wrong = _Wrong()
    for path, root in files:
        try:
            counted = "record" if is_array(path) else "line"
            for number, record in read_records(path):
                source = f"{path} {counted} {number}"
                try:
                    prompts.append((_conversation(record, root), root, source))
                except RecordError as error:
                    wrong.add(source, error)
        except ReadError as error:  # the message names the file, of which no more can be read
            wrong.add("", error)
    wrong.tell()
    return prompts


def _conversation(record: Any, root: Path) -> Conversation:
    """Converts a record. Raises RecordError if it is unusable or names a file outside ``root``."""
    if isinstance(record, BadLine):
        raise RecordError(record.reason, str(record))
    conversation = read_prompt(record)
    for kind, reference in conversation.media:
        check_reference(kind, reference, root)
    return conversation
