"""``megatron-vl generate``: reads prompts, starts the processes and turns tokens into text."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from converters.convert import check_base, megatron_adapter
from converters.peft_folder import is_peft_folder
from data_tools.formats import Conversation, RecordError, read_prompt
from data_tools.media import check_reference, describe_reference, read_media
from data_tools.records import ReadError, UnreadableRecord, is_json_array, read_records
from megatron_vl.config import DataConfig
from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.data.sample.chat import ChatError, read_stop_tokens
from megatron_vl.data.sample.pixels import PixelError
from megatron_vl.data.sample.thinking import split_thinking
from megatron_vl.errors import UserError
from megatron_vl.spec.layout import make_layout
from megatron_vl.weights.video_rule import exported_video_rule, weights_video_rule
from megatron_vl.weights.weight_reader import WeightReader, read_adapters
from toolkit.launch import last_output_lines, run_group
from toolkit.sample_encoder import SampleEncoder, write_samples
from toolkit.video_rules import resolve_video_rules

from .options import GenerateOptions
from .worker import GenerateJob

ANSWER_TOKENS, THINKING_TOKENS = 128, 2048
"""Default largest number of tokens of an answer, without and with thinking."""
THINK_CHOICES = {"on": True, "off": False, None: None}
"""Value of ``--thinking`` -> whether the model thinks; None leaves it to the chat template."""
MAX_NAMED_RECORDS = 10
"""Number of unusable records that are named; the others are only counted."""

SourcedConversation = tuple[Conversation, Path, str]
"""A conversation, the resolved folder of its media, and its file and line for messages (empty for
``--prompt``)."""


def run_generate(
    options: GenerateOptions, conversations: list[SourcedConversation], print_line: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Generates the next turn of each conversation.

    Args:
        options: with the platform and type that were left to the command.

    Returns:
        {"text", "thinking", "tokens", "prompt_tokens", "finished"} of each conversation. ``tokens`` are the
        ids of the whole answer; ``text`` is the answer without what the model thought.

    Raises:
        UserError, FileNotFoundError: the processes failed, or the request is impossible.
    """
    sample_encoder = _make_encoder(options, print_line)
    layout = make_layout(sample_encoder.spec, **options.layout_arguments)
    samples = _encode_prompts(sample_encoder, conversations, THINK_CHOICES[options.thinking])

    # The processes get token ids and pixels through files. They know nothing of prompts and texts.
    with tempfile.TemporaryDirectory(prefix="megatron-vl-generate-") as temporary_dir:
        work_dir = Path(temporary_dir)
        generate_job = _make_job(options, sample_encoder, samples, work_dir)
        world_size = layout.replica_ranks * layout.min_data_parallel_size
        print_line(
            f"{len(samples)} prompts of {sum(map(len, samples))} tokens, {world_size} "
            f"process{'es' if world_size > 1 else ''}"
        )
        answer_token_ids = _run_job(generate_job, world_size, work_dir)

    answer_records = []
    for sample, token_ids in zip(samples, answer_token_ids, strict=True):
        answer_record, shortcoming = _read_answer(sample_encoder, generate_job, sample, token_ids)
        answer_records.append(answer_record)
        if shortcoming:
            print_line(f"answer {len(answer_records)} {shortcoming}")
    return answer_records


def _make_encoder(options: GenerateOptions, print_line: Callable[[str], None]) -> SampleEncoder:
    """The encoder of the prompts. Raises UserError if ``--checkpoint`` holds another model than ``--hf``."""
    weight_reader = WeightReader(options.checkpoint)
    spec = weight_reader.spec
    if options.adapter is not None and not is_peft_folder(options.adapter):
        # The adapters know better than their base how videos were presented.
        weight_reader = read_adapters(options.adapter)
    # Videos must be presented as in the training of these weights.
    video_rules = checkpoint_video_rules(weight_reader, options.hf, options.asked_rules(), print_line)
    data_config = DataConfig(
        video_fps=options.video_fps, video_max_frames=options.video_max_frames, **video_rules
    )
    sample_encoder = SampleEncoder(options.hf, data_config)
    if spec.different_fields(sample_encoder.spec):
        raise UserError(f"--checkpoint {options.checkpoint} holds a different model than --hf {options.hf}")
    return sample_encoder


def _make_job(
    options: GenerateOptions, sample_encoder: SampleEncoder, samples: list[TokenizedSample], work_dir: Path
) -> GenerateJob:
    """The job of the processes. Writes the samples and the adapters that it names into ``work_dir``."""
    begins_by_thinking = any(map(sample_encoder.begins_by_thinking, samples))
    stop_token_ids = read_stop_tokens(options.hf, sample_encoder.chat_encoder.tokenizer)
    adapter_dir = options.adapter
    if adapter_dir is not None:
        adapter_dir = megatron_adapter(adapter_dir, options.hf, work_dir)
        check_base(read_adapters(adapter_dir), WeightReader(options.checkpoint, should_verify=False))
    write_samples(samples, work_dir / "samples.safetensors")
    return GenerateJob(
        hf=str(options.hf),
        checkpoint=str(options.checkpoint),
        adapter=str(adapter_dir or ""),
        samples=str(work_dir / "samples.safetensors"),
        layout=options.layout_arguments,
        max_new_tokens=options.max_new_tokens or (THINKING_TOKENS if begins_by_thinking else ANSWER_TOKENS),
        stop=stop_token_ids,
        dtype=options.dtype or "float32",
        platform=options.platform,
        batch=options.batch,
        video_positions=sample_encoder.data_config.video_positions,
    )


def _run_job(generate_job: GenerateJob, world_size: int, work_dir: Path) -> list[list[int]]:
    """Runs the processes of a job. Returns the token ids of each answer, in the order of the prompts."""
    (work_dir / "job.json").write_text(json.dumps(dataclasses.asdict(generate_job)))
    completed_process = run_group(
        "toolkit.generate.worker",
        [work_dir / "job.json", work_dir / "answers.json"],
        world_size,
        on_cpu=generate_job.platform == "cpu",
    )
    if completed_process.returncode:
        raise UserError(f"the processes failed:\n{last_output_lines(completed_process)}")
    return json.loads((work_dir / "answers.json").read_text())


def _read_answer(
    sample_encoder: SampleEncoder, generate_job: GenerateJob, sample: TokenizedSample, token_ids: list[int]
) -> tuple[dict[str, Any], str]:
    """An answer as :func:`run_generate` returns it, and what it lacks in words; empty if it lacks nothing."""
    decoded_text = sample_encoder.chat_encoder.tokenizer.decode(token_ids, skip_special_tokens=True)
    # The first token that the model generates may already be inside a block of thinking.
    split_answer = split_thinking(decoded_text, sample_encoder.begins_by_thinking(sample))
    is_finished = token_ids[-1] in generate_job.stop
    answer_record = {
        "text": split_answer.answer_text,
        "thinking": split_answer.thinking_text,
        "tokens": token_ids,
        "prompt_tokens": len(sample),
        "finished": is_finished,
    }
    token_limit = generate_job.max_new_tokens
    if is_finished and split_answer.is_block_closed:
        return answer_record, ""
    if is_finished:
        return answer_record, "is empty: the model ended its turn while it was thinking"
    if split_answer.is_block_closed:
        return answer_record, f"was cut after {token_limit} tokens; raise --max-new-tokens"
    return answer_record, (
        f"is empty: the model was still thinking after {token_limit} tokens;"
        " raise --max-new-tokens, or give --thinking off"
    )


def checkpoint_video_rules(
    weight_reader: WeightReader, hf_dir: Path, asked_rules: dict[str, str], print_line: Callable[[str], None]
) -> dict[str, Any]:
    """Fields of :class:`DataConfig`: the rules asked for, and the one that the checkpoint was trained under.

    A run's checkpoint names its rule, and so do weights that come from one. Otherwise ``hf_dir`` does, if it
    is an export.

    Raises:
        UserError: like :func:`toolkit.video_rules.resolve_video_rules`.
    """
    rule_dir = weight_reader.path
    trained_rules = weights_video_rule(rule_dir, weight_reader.manifest, weight_reader.spec)
    if not trained_rules:
        rule_dir = hf_dir
        trained_rules = exported_video_rule(hf_dir, weight_reader.spec)
    return resolve_video_rules(rule_dir, trained_rules, asked_rules, print_line)


def _encode_prompts(
    sample_encoder: SampleEncoder, conversations: list[SourcedConversation], think: bool | None
) -> list[TokenizedSample]:
    """Encodes the prompts. Raises UserError, which names the prompts that the model cannot take."""
    samples = []
    unusable_records = _UnusableRecords()
    for conversation, media_root, source in conversations:
        try:
            media_contents = []
            for media_kind, reference in conversation.media_references:
                media_bytes = read_media(media_kind, reference, media_root)
                media_contents.append((media_kind, describe_reference(reference), media_bytes))

            samples.append(
                sample_encoder.encode_prompt(
                    conversation.messages, media_contents, conversation.tool_definitions, think
                )
            )
        except (RecordError, ChatError, PixelError) as error:
            unusable_records.add_record(source, error)
    unusable_records.raise_if_any()
    return samples


class _UnusableRecords:
    """Collects records that cannot be used."""

    def __init__(self) -> None:
        self.message_lines: list[str] = []
        self.record_count = 0

    def add_record(self, record_source: str, error: ValueError) -> None:
        self.record_count += 1
        error_reason = error.reason if isinstance(error, RecordError) else ""
        if error_reason == str(error):  # a record without details repeats its reason
            error_reason = ""
        message_parts = filter(None, (record_source, error_reason, str(error)))
        if self.record_count <= MAX_NAMED_RECORDS:
            self.message_lines.append(": ".join(message_parts))

    def raise_if_any(self) -> None:
        """Raises UserError if there are any."""
        if self.record_count == 1:
            raise UserError(self.message_lines[0])
        if self.record_count:
            message_lines = [f"{self.record_count} records cannot be used:", *self.message_lines]
            if self.record_count > MAX_NAMED_RECORDS:
                message_lines.append(f"and {self.record_count - MAX_NAMED_RECORDS} more")
            raise UserError("\n  ".join(message_lines))


def make_conversation(prompt_text: str, image_paths: list[Path], video_paths: list[Path]) -> Conversation:
    """Makes a user's turn of pictures, videos, then the text."""
    content_parts: list[dict[str, Any]] = []
    for media_kind, paths in (("image", image_paths), ("video", video_paths)):
        for path in paths:
            content_parts.append({"type": media_kind, media_kind: str(path.resolve())})
    content_parts.append({"type": "text", "text": prompt_text})
    return read_prompt({"messages": [{"role": "user", "content": content_parts}]})


def read_prompt_files(prompt_files: list[tuple[Path, Path]]) -> list[SourcedConversation]:
    """Reads the conversations of JSON or JSON-lines files; leaves out a final assistant turn.

    Args:
        prompt_files: each file with the resolved folder of its media.

    Raises:
        UserError: records cannot be used, or their media are missing; the message names the first ten and
            counts all of them.
    """
    conversations: list[SourcedConversation] = []
    unusable_records = _UnusableRecords()
    for prompt_file, media_root in prompt_files:
        try:
            counted_unit = "record" if is_json_array(prompt_file) else "line"
            for record_number, record in read_records(prompt_file):
                record_source = f"{prompt_file} {counted_unit} {record_number}"
                try:
                    conversations.append((_read_conversation(record, media_root), media_root, record_source))
                except RecordError as error:
                    unusable_records.add_record(record_source, error)
        except ReadError as error:  # the message names the file, of which no more can be read
            unusable_records.add_record("", error)
    unusable_records.raise_if_any()
    return conversations


def _read_conversation(record: Any, media_root: Path) -> Conversation:
    """Converts a record. Raises RecordError if it is unusable or names a file outside ``media_root``."""
    if isinstance(record, UnreadableRecord):
        raise RecordError(record.reason, str(record))
    conversation = read_prompt(record)
    for kind, media_reference in conversation.media_references:
        check_reference(kind, media_reference, media_root)
    return conversation
