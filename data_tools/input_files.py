"""Finds the files of an input: a file, a folder of ``datasets`` or of files, or LLaMA-Factory's index.

The index, ``dataset_info.json``, names data sets with their file, format and columns. Sets on a hub are
refused with what to do: nothing is downloaded.
"""

import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_vl.data.source.dataset_description import METADATA_DIR

from .records import (
    COMPRESSION_SUFFIXES,
    HEADED_SUFFIXES,
    TABLE_SUFFIXES,
    ConvertError,
    column_names,
    read_records,
    unique_keys,
)

TEXT_SUFFIXES = (".json", ".jsonl", ".ndjson")
INDEX_FILE = "dataset_info.json"
REMOTE_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
FORMAT_BY_FORMATTING = {"alpaca": "alpaca", "sharegpt": "", "openai": ""}
"""Our format for each ``formatting``; empty: the record's own."""
FIELD_BY_COLUMN = {"prompt": "instruction", "query": "input", "response": "output", "messages": ""} | {
    name: name
    for name in ("history", "system", "tools", "images", "videos", "audios", "chosen", "rejected", "kto_tag")
}
"""Our field for each entry of ``columns``; that of messages depends on the tags."""
ROLE_TAGS = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "function_call"),
    "system_tag": ("system", "system"),
}
"""Default of each tag that names a role, and our role for it."""
DEFAULT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    **{tag: default for tag, (default, _) in ROLE_TAGS.items()},
}
SPLIT_PATTERN = re.compile(r"(?i)(?:^|[-_./])(train|test|validation|valid|val|dev)(?:[-_.]|$)")


ONE_KIND = "give one of its files or folders, or several with `megatron-vl data convert --input`"
COLUMN_FIELDS = {"user": "instruction", "assistant": "output", "image": "images", "video": "videos"} | {
    name: name for name in ("images", "videos", "system", "tools", "id", "caption", "text")
}
TRAINED_FIELDS = ("output", "caption", "text")
MAX_SHOWN_NAMES = 300


@dataclass(frozen=True)
class InputFile:
    """A file of records, and how an index says that they are to be read."""

    path: Path
    format_name: str = ""
    field_by_column: dict[str, str] = field(default_factory=dict)
    """Our field for each field that the index names; the others have no effect. Empty: no index."""
    role_tags: dict[str, str] = field(default_factory=dict)

    def rename_fields(self, record: Any) -> Any:
        if not isinstance(record, dict):
            return record
        if self.field_by_column:
            known_fields = {**self.field_by_column, "id": "id"}
            record = _renamed(record, known_fields, KNOWN_FIELDS | set(known_fields.values()))
        if self.role_tags and isinstance(record.get("conversations"), list):
            turns = [self._rename_turn(turn) for turn in record["conversations"]]
            record = {**record, "conversations": turns}
        return record

    def _rename_turn(self, turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        keys = {self.role_tags["role_tag"]: "role", self.role_tags["content_tag"]: "content"}
        turn = {"role": None, "content": None} | _renamed(turn, keys, {"role", "content"})
        role_by_tag = {self.role_tags[tag]: role for tag, (_, role) in ROLE_TAGS.items()}
        if isinstance(turn["role"], str):  # another type is refused where the record is read
            turn["role"] = role_by_tag.get(turn["role"], turn["role"])
        return turn


def _renamed(json_object: dict[str, Any], new_keys: dict[str, str], taken_keys: set[str]) -> dict[str, Any]:
    """An object with other keys. One that the index leaves out must not be read as one of ``taken_keys``."""
    renamed_object = {new_keys[key]: value for key, value in json_object.items() if key in new_keys}
    for key, value in json_object.items():
        if key not in new_keys:
            renamed_object[f"{key} (not among the columns)" if key in taken_keys else key] = value
    return renamed_object


KNOWN_FIELDS = {
    *FIELD_BY_COLUMN.values(),
    *("image", "video", "conversations", "messages", "conversation", "weight"),
    *("text", "caption", "texts", "text_list", "image_info"),
}


def find_input_files(input_paths: list[Path]) -> list[InputFile]:
    """The files of all inputs, in order. ``dataset_info.json:a,b`` means two data sets of an index.

    Raises:
        ConvertError: an input does not exist, or holds what cannot be read here.
    """
    input_files: list[InputFile] = []
    for path in input_paths:
        index_name, colon, dataset_names = path.name.partition(":")
        if colon and index_name == INDEX_FILE:
            input_files += _index_files(path.with_name(INDEX_FILE), dataset_names.split(","))
        elif path.is_dir():
            input_files += [InputFile(file) for file in _folder_files(path)]
        elif not path.exists():
            raise ConvertError(f"{path} is not a file or folder")
        elif path.name == INDEX_FILE:
            input_files += _index_files(path, None)
        else:
            input_files.append(InputFile(path))
    if not input_files:
        raise ConvertError("the inputs name no file")
    return input_files


def parse_columns(columns_text: str) -> dict[str, str]:
    """``question=user,answer=assistant``: our field for each column.

    Raises:
        ConvertError: an entry is something else, or no column or more than one is trained on.
    """
    field_by_column: dict[str, str] = {}
    for entry in columns_text.split(","):
        column, _, part = entry.strip().partition("=")
        if not column or part not in COLUMN_FIELDS or COLUMN_FIELDS[part] in field_by_column.values():
            raise ConvertError(
                f"--columns {columns_text}: {entry!r} is not COLUMN=PART, with each of the parts"
                f" {', '.join(COLUMN_FIELDS)} once"
            )
        field_by_column[column] = COLUMN_FIELDS[part]
    trained_fields = set(TRAINED_FIELDS) & set(field_by_column.values())
    if not trained_fields:
        raise ConvertError(f"--columns {columns_text}: no column is the answer; add COLUMN=assistant")
    if len(trained_fields) > 1:
        raise ConvertError(
            f"--columns {columns_text}: give one of the parts assistant, caption and text; a caption without"
            " a question is a document"
        )
    return field_by_column


def with_columns(input_files: list[InputFile], columns_text: str) -> list[InputFile]:
    """The files with the fields of ``--columns``.

    Raises:
        ConvertError: as :func:`parse_columns` raises it; or a file lacks the column of a question or of what
            is trained on, or all tables lack another one.
    """
    field_by_column = parse_columns(columns_text)
    names_by_path = {source.path: _field_names(source.path) for source in input_files}
    seen = {*itertools.chain.from_iterable(names_by_path.values())}
    if not all(path.suffix in HEADED_SUFFIXES for path in names_by_path):
        seen.update(field_by_column)  # later records may have it
    for path, names in names_by_path.items():
        for column, known_field in field_by_column.items():
            if names and column not in (names if known_field in ("instruction", *TRAINED_FIELDS) else seen):
                shown_names = ", ".join(map(repr, names))[:MAX_SHOWN_NAMES]
                raise ConvertError(
                    f"--columns {columns_text}: {path} has no {column!r}; it has {shown_names}"
                )
    format_name = "alpaca" if "output" in field_by_column.values() else "document"
    return [InputFile(source.path, format_name, field_by_column) for source in input_files]


def _field_names(records_path: Path) -> list[str]:
    """The columns of a table, or the fields of a file's first records; none of a pipe, which is read once."""
    try:
        if records_path.is_file() and records_path.suffix in HEADED_SUFFIXES:
            return column_names(records_path)
    except (ValueError, OSError) as error:
        raise ConvertError(f"{records_path} cannot be read: {error}") from error
    records = itertools.islice(read_records(records_path), 10 if records_path.is_file() else 0)
    return list(dict.fromkeys(name for _, r in records if isinstance(r, dict) for name in r))


def input_names(input_paths: list[Path]) -> list[str]:
    """The names of the input files in messages: the file name, or the path if two files share a name."""
    file_names = [path.name for path in input_paths]
    if len(set(file_names)) == len(file_names):
        return file_names
    common_dir = os.path.commonpath([path.resolve().parent for path in input_paths])
    return [str(path.resolve().relative_to(common_dir)) for path in input_paths]


def _folder_files(input_dir: Path) -> list[Path]:
    """The files of a folder: one that ``save_to_disk`` of ``datasets`` wrote, or files of one kind."""
    if (input_dir / "dataset_dict.json").is_file():
        listed_splits = _read_list(input_dir / "dataset_dict.json", "splits", str)
        raise ConvertError(
            f"{input_dir} has the splits {', '.join(listed_splits)}; give the folder of each "
            f"split to use, for instance {input_dir / listed_splits[0]}"
        )
    if (input_dir / "state.json").is_file():
        file_entries = _read_list(input_dir / "state.json", "_data_files", dict)
        files = [input_dir / Path(str(entry.get("filename"))).name for entry in file_entries]
        if missing_files := [file for file in files if not file.is_file()]:
            raise ConvertError(f"{input_dir}: {missing_files[0].name} is missing")
        _refuse_outside(input_dir, files)
        return files

    files = sorted(record_files(input_dir))
    suffixes = sorted(set(map(record_suffix, files)))
    if len(suffixes) != 1:
        suffixes_text = " and ".join(suffixes) or f"no {', '.join((*TABLE_SUFFIXES, *TEXT_SUFFIXES))}"
        advice = f"give its data set {input_dir}/data" if (input_dir / "data/.nv-meta").exists() else ONE_KIND
        raise ConvertError(f"{input_dir} holds {suffixes_text}; {advice}")

    # Test data would be trained on if a folder with several splits were read as a whole.
    split_matches = [SPLIT_PATTERN.search(str(path.relative_to(input_dir))) for path in files]
    splits = sorted({split_match[1].lower() for split_match in split_matches if split_match})
    if len(splits) > 1:
        raise ConvertError(f"{input_dir} holds the splits {', '.join(splits)}; {ONE_KIND}")
    _refuse_outside(input_dir, files)
    return files


def record_files(folder: Path) -> Iterator[Path]:
    """The files below a folder that may hold records; hidden ones and those of data sets do not."""
    for parent, folder_names, file_names in folder.walk():
        folder_names[:] = [
            name for name in folder_names if name[0] != "." and not (parent / name / METADATA_DIR).exists()
        ]
        names = [name for name in file_names if name[0] != "." and name != INDEX_FILE]
        yield from filter(record_suffix, [parent / name for name in names])


def _refuse_outside(input_dir: Path, file_paths: list[Path]) -> None:
    """Raises ConvertError if a file, with links followed, is not inside its folder, or is a named pipe."""
    real_dir = input_dir.resolve()
    # The files of a hub's cache are links to its folder of blobs.
    snapshots = [path for path in (real_dir, *real_dir.parents) if path.parent.name == "snapshots"]
    hub_dirs = (path.parents[1] for path in snapshots if (path.parents[1] / "blobs").is_dir())
    allowed_dir = next(hub_dirs, real_dir)
    for file_path in file_paths:
        if not file_path.resolve().is_relative_to(allowed_dir):
            raise ConvertError(
                f"{file_path} leads to {file_path.resolve()}, which is not inside {allowed_dir}; copy the"
                " file there, or give it as an input of its own"
            )
        if file_path.is_fifo():
            raise ConvertError(f"{file_path} is a named pipe; give it as an input of its own")


def _read_json(json_path: Path) -> Any:
    try:
        return json.loads(json_path.read_text(), object_pairs_hook=unique_keys)
    except (OSError, ValueError, RecursionError) as error:
        raise ConvertError(f"{json_path} is not JSON, or not clear: {error}") from error


def _read_list(json_path: Path, list_key: str, item_type: type) -> list[Any]:
    """The list under a key of a file that ``datasets`` wrote. Raises ConvertError if it has no such list."""
    json_object = _read_json(json_path)
    items = json_object.get(list_key) if isinstance(json_object, dict) else None
    if not isinstance(items, list) or not items or not all(isinstance(item, item_type) for item in items):
        raise ConvertError(f"{json_path} is damaged: it has no list {list_key!r}; save the data set again")
    return items


def record_suffix(file_path: Path) -> str:
    """The suffix of a file that can be read, without that of its compression; empty for others."""
    suffix = file_path.suffix
    if suffix in COMPRESSION_SUFFIXES:
        suffix = Path(file_path.stem).suffix
    return suffix if suffix in (*TABLE_SUFFIXES, *TEXT_SUFFIXES) else ""


def _index_files(index_path: Path, dataset_names: list[str] | None) -> list[InputFile]:
    """The files of data sets of LLaMA-Factory's index, in order; without names, of all of them."""
    index = _read_json(index_path)
    if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
        raise ConvertError(
            f"{index_path} is not an index: a name and a description of each data set are required"
        )
    if unknown_names := [name for name in dataset_names or [] if name not in index]:
        raise ConvertError(
            f"{index_path} does not have {', '.join(unknown_names)}; it has {', '.join(sorted(index))}"
        )
    index = {name: entry for name, entry in index.items() if dataset_names is None or name in dataset_names}
    for name, entry in index.items():
        if hub_name := next((entry[key] for key in REMOTE_KEYS if entry.get(key)), ""):
            raise ConvertError(
                f"{index_path}: {name} is on a hub, and nothing is downloaded here. Download it (hf download"
                f" --repo-type dataset {hub_name} --local-dir DIR) and put its file or folder under"
                f' "file_name", or choose local ones: {index_path}:NAME,NAME'
            )
    return [source for name, entry in index.items() for source in _index_entry_files(index_path, name, entry)]


def _index_entry_files(index_path: Path, dataset_name: str, entry: dict[str, Any]) -> list[InputFile]:
    """The files of one data set of an index. Raises ConvertError if its entry cannot be used."""
    location = f"{index_path}: {dataset_name}"
    if entry.get("ranking"):
        raise ConvertError(f"{location} has preferences, which supervised training cannot use")
    if entry.get("num_samples") is not None:
        raise ConvertError(
            f"{location} asks for num_samples; take it out, and use a mixture's weights instead"
        )
    formatting = entry.get("formatting", "alpaca")
    if formatting not in FORMAT_BY_FORMATTING:
        raise ConvertError(
            f"{location} has the formatting {formatting!r}; valid: {', '.join(FORMAT_BY_FORMATTING)}"
        )
    file_name = entry.get("file_name")
    if not isinstance(file_name, str):
        raise ConvertError(f'{location} has no "file_name"')

    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    if unknown_names := [name for name in (*columns, *tags) if name not in FIELD_BY_COLUMN | DEFAULT_TAGS]:
        raise ConvertError(f"{location}: the columns or tags {', '.join(unknown_names)} are unknown")
    field_by_column = {
        column: FIELD_BY_COLUMN[key] or "conversations" for key, column in columns.items() if column
    }
    if tags and not columns:
        field_by_column = {"conversations": "conversations"}

    data_path = index_path.parent / file_name
    _refuse_outside(index_path.parent, [data_path])
    files = _folder_files(data_path) if data_path.is_dir() else [data_path]
    if not files[0].is_file():
        raise ConvertError(f"{location}: {data_path} does not exist")

    role_tags = {**DEFAULT_TAGS, **tags} if tags else {}
    return [InputFile(file, FORMAT_BY_FORMATTING[formatting], field_by_column, role_tags) for file in files]
