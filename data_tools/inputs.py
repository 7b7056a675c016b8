"""Finds the files of an input: a file, a folder of ``datasets`` or of files, or LLaMA-Factory's index.

The index, ``dataset_info.json``, names data sets with their file, format and columns. Sets on a hub are
refused with what to do: nothing is downloaded.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_vl.errors import UserError

from .tables import SUFFIXES

TEXT_SUFFIXES = (".json", ".jsonl", ".ndjson")
COMPRESSED = (".gz", ".zst")
INDEX = "dataset_info.json"
ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
FORMATTING = {"alpaca": "alpaca", "sharegpt": "", "openai": ""}
"""Our format for each ``formatting``; empty: the record's own."""
COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "messages": "",
    "system": "system",
    "tools": "tools",
    "images": "images",
    "videos": "videos",
    "audios": "audios",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "kto_tag",
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
SPLIT = re.compile(r"(?i)(?:^|[-_./])(train|test|validation|valid|val|dev)(?:[-_.]|$)")


class InputError(UserError, ValueError):
    """An input that cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """A file of records, and how an index says that they are to be read."""

    path: Path
    format: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    """Our field for each field that the index names; the others have no effect. Empty: no index."""
    tags: dict[str, str] = field(default_factory=dict)

    def plan(self) -> dict[str, Any]:
        """What the index says, for comparison with another run."""
        return {"format": self.format, "columns": self.columns, "tags": self.tags}

    def renamed(self, record: Any) -> Any:
        """A record with our names of fields, keys and roles."""
        if not isinstance(record, dict):
            return record
        if self.columns:
            known = {**self.columns, "id": "id"}
            taken = set(known.values())
            out = {known[name]: value for name, value in record.items() if name in known}
            # A field that the index leaves out must not be read under its own name.
            out |= {
                (f"{name} (not in the index)" if name in OURS or name in taken else name): value
                for name, value in record.items()
                if name not in known
            }
            record = out

        if self.tags and isinstance(record.get("conversations"), list):
            record = {**record, "conversations": [self._turn(turn) for turn in record["conversations"]]}
        return record

    def _turn(self, turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        role, content = self.tags["role_tag"], self.tags["content_tag"]
        roles = {self.tags[tag]: ours for tag, (_, ours) in ROLE_TAGS.items()}
        # A field that the tags leave out must not be read as the role or the content.
        rest = {
            f"{name} (not in the index)" if name in ("role", "content") else name: value
            for name, value in turn.items()
            if name not in (role, content)
        }
        written = turn.get(role)
        found = roles.get(written, written) if isinstance(written, str) else written
        return {**rest, "role": found, "content": turn.get(content)}


OURS = {*COLUMNS.values(), "image", "video", "conversations", "messages", "conversation", "weight"}


def expand(inputs: list[Path], datasets: list[str] | None = None) -> list[Source]:
    """The files of all inputs, in order.

    Args:
        datasets: names in an index; None: all of them.

    Raises:
        InputError: an input does not exist, or holds what cannot be read here.
    """
    sources: list[Source] = []
    used: set[str] = set()
    known: set[str] = set()

    for path in inputs:
        if path.is_dir():
            sources += [Source(file) for file in _folder(path)]
        elif not path.is_file():
            raise InputError(f"--input {path} is not a file or folder")
        elif path.suffix.lower() in (".csv", ".tsv"):
            raise InputError(f"--input {path}: tables of text are not read; write JSON lines or Parquet")
        elif (index := _index(path)) is not None:
            chosen = [name for name in index if datasets is None or name in datasets]
            used.update(chosen)
            known.update(index)
            sources += _indexed(path, {name: index[name] for name in chosen})
        else:
            sources.append(Source(path))

    if unknown := [name for name in datasets or [] if name not in used]:
        has = f"; it has {', '.join(sorted(known))}" if known else ""
        raise InputError(f"--dataset {', '.join(unknown)}: no {INDEX} among the inputs has it{has}")
    if not sources:
        raise InputError("the inputs name no file")
    return sources


def _folder(folder: Path) -> list[Path]:
    """The files of a folder: one that ``save_to_disk`` of ``datasets`` wrote, or files of one kind."""
    if (folder / "dataset_dict.json").is_file():
        saved = _listed(folder / "dataset_dict.json", "splits", str)
        raise InputError(
            f"--input {folder} has the splits {', '.join(saved)}; give the folder of each "
            "split to use, for instance " + str(folder / saved[0])
        )
    if (folder / "state.json").is_file():
        entries = _listed(folder / "state.json", "_data_files", dict)
        files = [folder / Path(str(entry.get("filename"))).name for entry in entries]
        if gone := [file for file in files if not file.is_file()]:
            raise InputError(f"--input {folder}: {gone[0].name} is missing")
        return files

    found = sorted(path for path in folder.rglob("*") if path.is_file() and kind(path) and path.name != INDEX)
    kinds = {kind(path) for path in found}
    if len(kinds) != 1:
        held = " and ".join(sorted(kinds)) or f"no {', '.join((*SUFFIXES, *TEXT_SUFFIXES))}"
        raise InputError(f"--input {folder} holds {held}; give the files to use")
    splits = {match[1].lower() for path in found if (match := SPLIT.search(str(path.relative_to(folder))))}
    if len(splits) > 1:
        raise InputError(
            f"--input {folder} holds the splits {', '.join(sorted(splits))}; give the files to use"
        )
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from error


def _listed(path: Path, key: str, of: type) -> list[Any]:
    """The list under a key of a file that ``datasets`` wrote. Raises InputError if it has no such list."""
    value = _json(path)
    listed = value.get(key) if isinstance(value, dict) else None
    if not isinstance(listed, list) or not listed or not all(isinstance(item, of) for item in listed):
        raise InputError(f"{path} is damaged: it has no list {key!r}; save the data set again")
    return listed


def kind(path: Path) -> str:
    """The suffix of a file that can be read, without that of its compression; empty for others."""
    suffix = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
    return suffix if suffix in (*SUFFIXES, *TEXT_SUFFIXES) else ""


def _index(path: Path) -> dict[str, dict[str, Any]] | None:
    """The data sets of LLaMA-Factory's index; None if the file is something else."""
    if path.name != INDEX:
        return None
    index = _json(path)
    if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
        raise InputError(f"{path} is not an index: a name and a description of each data set are required")
    return index


def _indexed(path: Path, index: dict[str, dict[str, Any]]) -> list[Source]:
    remote = [name for name, entry in index.items() if any(entry.get(key) for key in ELSEWHERE)]
    if remote:
        name = remote[0]
        where = next(index[name][key] for key in ELSEWHERE if index[name].get(key))
        local = [name for name in index if name not in remote]
        advice = f"choose the local ones with --dataset {' '.join(local)}" if local else "no other is local"
        raise InputError(
            f"{path}: {', '.join(remote)} {'is' if len(remote) == 1 else 'are'} on a hub, and nothing is "
            f"downloaded here. Download it (hf download --repo-type dataset {where} --local-dir DIR) and put "
            f'its file or folder under "file_name", or {advice}'
        )
    return [source for name, entry in index.items() for source in _entry(path, name, entry)]


def _entry(path: Path, name: str, entry: dict[str, Any]) -> list[Source]:
    where = f"{path}: {name}"
    if entry.get("ranking"):
        raise InputError(f"{where} has preferences, which supervised training cannot learn")
    if entry.get("num_samples") is not None:
        raise InputError(f"{where} asks for num_samples; take it out, and use a mixture's weights instead")
    formatting = entry.get("formatting", "alpaca")
    if not isinstance(formatting, str) or formatting not in FORMATTING:
        raise InputError(f"{where} has the formatting {formatting!r}; valid: {', '.join(FORMATTING)}")
    file_name = entry.get("file_name")
    if not isinstance(file_name, str):
        raise InputError(f'{where} has no "file_name"')

    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    for key, names_of in (("columns", columns), ("tags", tags)):
        named = isinstance(names_of, dict) and all(isinstance(n, str | None) for n in names_of.values())
        if not named:
            raise InputError(f"{where}: {key} must give a field's name for each of its keys")
    if unknown := [key for key in columns if key not in COLUMNS]:
        raise InputError(f"{where}: the columns {', '.join(unknown)} are unknown")
    ours = {theirs: COLUMNS[key] or "conversations" for key, theirs in columns.items() if theirs}
    names = {
        "role_tag": "from",
        "content_tag": "value",
        **{tag: default for tag, (default, _) in ROLE_TAGS.items()},
    }
    if unknown := [key for key in tags if key not in names]:
        raise InputError(f"{where}: the tags {', '.join(unknown)} are unknown")
    if tags and not columns:
        ours = {"conversations": "conversations"}

    at = path.parent / file_name
    files = _folder(at) if at.is_dir() else [at]
    if not files[0].is_file():
        raise InputError(f"{where}: {at} does not exist")
    return [Source(file, FORMATTING[formatting], ours, {**names, **tags} if tags else {}) for file in files]
