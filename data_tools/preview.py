"""Says what a conversion would understand of the first records of each file, without writing anything."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .convert import ConversionOptions, check_inputs, duplicate_id_error, read_record
from .formats import Conversation, RecordError
from .formats.conversation import message_text
from .input_files import InputFile
from .media import MediaInfo
from .records import read_records
from .resume import input_names

RECORDS_PER_FILE = 200
"""Records of each file that are looked at."""
TOKEN_SIDE_PIXELS = 28
"""Side in pixels of what becomes one token in Qwen2-VL and Qwen2.5-VL (32 in later families)."""
MAX_TOKENS_PER_MEDIUM = 16384
MAX_EXAMPLES = 3


@dataclass
class FilePreview:
    """What was understood of a file's first records."""

    file: str
    records: int = 0
    samples: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)
    media: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    """Samples with tools, calls, reasoning, loss weights."""
    tokens: int = 0
    """Estimate: a token for four characters of ASCII or one of other scripts, and for each 28 x 28 pixels."""
    ignored: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    """Record, field, reason and detail of the first records of each reason that cannot be used."""
    first: list[str] = field(default_factory=list)
    """The turns of the first sample, shortened."""
    notes: list[str] = field(default_factory=list)
    """What is probably wrong with the arguments."""

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def preview_files(input_paths: list[Any], options: ConversionOptions) -> list[FilePreview]:
    """Looks at the first records of each file. Media are decoded as in a conversion.

    Raises:
        ConvertError, ReadError: an argument or a file cannot be used.
    """
    sources = check_inputs(input_paths, options)
    file_names = input_names([source.path for source in sources])
    first_records: dict[str, tuple[str, int]] = {}
    file_previews = []
    for file_name, source in zip(file_names, sources, strict=True):
        file_previews.append(_preview_file(file_name, source, options, first_records))
    return file_previews


def _preview_file(
    file_name: str,
    input_file: InputFile,
    options: ConversionOptions,
    first_records: dict[str, tuple[str, int]],
) -> FilePreview:
    """Looks at the first records of a file.

    Args:
        first_records: file and number of the first usable record by its id; those of this file are added.
    """
    file_preview = FilePreview(file_name)
    field_counts: Counter[str] = Counter()

    for record_number, record in itertools.islice(read_records(input_file.path), RECORDS_PER_FILE):
        file_preview.records += 1
        if isinstance(record, dict):
            field_counts.update(map(str, record))

        try:
            renamed_record = input_file.rename_fields(record)
            conversation, media_infos = read_record(renamed_record, options, input_file.format_name)
            if conversation.record_identity and options.duplicate_ids == "refuse":
                location = (file_name, record_number)
                first_location = first_records.setdefault(conversation.record_identity, location)
                if first_location != location:
                    raise duplicate_id_error(conversation.record_identity, *first_location)
        except RecordError as error:
            file_preview.refused[error.reason] += 1
            if file_preview.refused[error.reason] <= MAX_EXAMPLES:
                field_text = f", field {error.field_path}" if error.field_path else ""
                file_preview.examples.append(f"record {record_number}{field_text}: {error.reason}: {error}")
        else:
            _count_sample(file_preview, conversation, media_infos)

    file_preview.notes = _argument_notes(file_preview, input_file, field_counts, options.root)
    return file_preview


def _argument_notes(
    file_preview: FilePreview, input_file: InputFile, field_counts: Counter[str], media_root: Path | None
) -> list[str]:
    """What is probably wrong with the arguments.

    Args:
        field_counts: the fields of the records.
    """
    argument_notes = []
    absent_columns = [name for name in input_file.field_by_column if not field_counts[name]]
    if file_preview.records and absent_columns:
        fields_text = ", ".join(sorted(field_counts)) or "no fields"
        argument_notes.append(
            f"columns of the index name {', '.join(absent_columns)}, "
            f"which no record has; they have {fields_text}"
        )
    if file_preview.refused["medium missing"]:
        argument_notes.append(f"media were looked for in {media_root} (--media-root)")
    return argument_notes


def _count_sample(
    file_preview: FilePreview, conversation: Conversation, media_infos: list[MediaInfo]
) -> None:
    file_preview.samples += 1
    file_preview.formats[conversation.format_name] += 1
    for media_info in media_infos:
        file_preview.media[media_info.kind] += 1
        file_preview.tokens += _media_tokens(media_info)
    for key_location, key in conversation.ignored_keys:
        file_preview.ignored[f"{key} ({key_location})"] += 1

    # A feature counts once for a sample, however many turns have it.
    feature_presence = {
        "tools": bool(conversation.tool_definitions),
        "tool calls": False,
        "reasoning": False,
        "loss weights": conversation.has_loss_weights,
    }
    for message in conversation.messages:
        file_preview.roles[message["role"]] += 1
        turn_text = message_text(message)
        if message.get("tool_calls"):
            feature_presence["tool calls"] = True
        if message.get("reasoning_content") or "<think>" in turn_text:
            feature_presence["reasoning"] = True
        ascii_count = sum(map(str.isascii, turn_text))
        file_preview.tokens += ascii_count // 4 + len(turn_text) - ascii_count + 5
    file_preview.features.update(name for name, is_present in feature_presence.items() if is_present)

    if file_preview.samples == 1:
        file_preview.first = [_shortened_turn(message) for message in conversation.messages]


def _media_tokens(media_info: MediaInfo) -> int:
    tokens = max(1, media_info.height * media_info.width // TOKEN_SIDE_PIXELS**2)
    if media_info.kind == "video":
        # Two frames a second are used, and a token covers two of them.
        tokens *= max(1, round(media_info.num_frames / max(media_info.fps, 1e-6)))
    return min(tokens, MAX_TOKENS_PER_MEDIUM)


def _shortened_turn(message: dict[str, Any]) -> str:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    text = "".join(part.get("text", f"<{part['type']}>") for part in parts)
    text = " ".join(text.split())
    turn_notes = [f"weight {message['loss_weight']:g}"] if "loss_weight" in message else []
    for call in message.get("tool_calls", []):
        turn_notes.append(f"calls {call['function']['name']}")
    turn_notes += ["with reasoning"] if message.get("reasoning_content") else []
    role_text = f"{message['role']} ({', '.join(turn_notes)})" if turn_notes else message["role"]
    return f"{role_text}: {text if len(text) <= 90 else text[:87] + '...'}"
