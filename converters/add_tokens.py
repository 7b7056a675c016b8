"""Gives a Hugging Face folder rows for more tokens, and a number of rows that tensor parallelism divides."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from megatron_vl.system.errors import UserError
from megatron_vl.weights.tensor_files import MatrixRegion, matrix_shape, row_regions
from megatron_vl.weights.trained_media import exported_facts

from .convert import WeightsReport, write_hf_folder
from .fp8 import Fp8Folder
from .hf_checkpoint import HfCheckpoint
from .hf_output import any_dtype, headers_of, write_index
from .output_folder import OutputTensor
from .rules import HF_OUTPUT
from .tensor_folder import TensorFolder

ROWS_MULTIPLE = 128
"""New numbers of rows are a multiple of it, as in the released folders: every tp divides it."""


def add_tokens(hf: str | Path, token_file: Path, output_dir: Path, *, force: bool = False) -> WeightsReport:
    """Writes a copy of a folder whose tokenizer knows more tokens, with a row for each token.

    A new row is the mean of the rows of the pieces into which the original tokenizer splits the token; in
    the output layer too, if it is not tied. Tokens that the tokenizer has and the embedding has not get such
    rows too. The number of rows stays if it is enough and a multiple of 8. Otherwise, it becomes the next
    multiple of 128; rows without a token are the mean of all rows with one.

    Args:
        token_file: one token in each line. It may be empty.

    Raises:
        WeightsError, ConfigError: the folder cannot be read.
        UserError: it has no ``tokenizer.json``, or a token cannot be added.
        FileExistsError: ``output_dir`` holds something that is not to be replaced.
    """
    source = HfCheckpoint(hf)
    folder = source.tensor_folder
    folder = folder.stored if isinstance(folder, Fp8Folder) else folder
    old_rows = source.spec.language.vocab_size
    lines = token_file.read_text(encoding="utf-8").splitlines()
    last_id, new_ids, pieces = _plan_tokens(source.path / "tokenizer.json", lines, old_rows)

    rows = max(old_rows, last_id + 1 + len(new_ids))
    if rows > old_rows or rows % 8:
        rows = -(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE
    resized = {source.stored_name_by_released[source.embedding_name]}
    if HF_OUTPUT in source.stored_name_by_released:
        resized.add(source.stored_name_by_released[HF_OUTPUT])
    outputs = []
    for name, file in folder.file_by_tensor.items():
        shape = folder.shape(name)
        read_region: Callable[[MatrixRegion], Tensor] = partial(folder.read_region, name)
        if name in resized:
            shape = (rows, *shape[1:])
            read_region = _resized_rows(folder, name, min(old_rows, last_id + 1), pieces)
        outputs.append(OutputTensor(file, name, shape, any_dtype(folder, name), name, read_region))

    def describe(output_path: Path) -> None:
        write_index(output_path, outputs)
        _edit_json(output_path / "config.json", lambda config: _set_rows(config, rows))
        if new_ids:
            _write_tokens(output_path, new_ids)

    arguments = (outputs, headers_of(outputs), output_dir, describe, exported_facts(source.path))
    report = write_hf_folder("convert", source, source, *arguments, force=force)
    report.notes.append(f"{rows} rows (before: {old_rows}), {len(pieces)} of them the mean of their pieces")
    if new_ids:
        report.notes.append(f"new tokens have the ids {min(new_ids.values())} to {max(new_ids.values())}")
    if kept := len(set(filter(None, lines))) - len(new_ids):
        report.notes.append(f"{kept} tokens were in the tokenizer already, and those with a row keep it")
    return report


def _plan_tokens(
    tokenizer_path: Path, texts: Sequence[str], old_rows: int
) -> tuple[int, dict[str, int], dict[int, list[int]]]:
    """The last id that the tokenizer has; ids of new tokens; pieces of each token without a row."""
    if not tokenizer_path.is_file():
        raise UserError(
            f"{tokenizer_path} is missing; load the folder's tokenizer with transformers and save it there"
        )
    fields = json.loads(tokenizer_path.read_text(encoding="utf-8"))
    added = fields["added_tokens"]
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    last_id = max(tokenizer.get_vocab().values())
    new_texts = [text for text in dict.fromkeys(texts) if len(_encode(tokenizer, text)) > 1]
    new_ids = {text: i for i, text in enumerate(new_texts, last_id + 1)}
    ids = {token["content"]: token["id"] for token in added if token["id"] >= old_rows} | new_ids
    splitter = Tokenizer.from_str(
        json.dumps(fields | {"added_tokens": [token for token in added if token["id"] < old_rows]})
    )
    pieces = {i: _encode(splitter, text) for text, i in ids.items()}
    enlarged = Tokenizer.from_str(json.dumps(fields | {"added_tokens": added + _entries(new_ids)}))
    for text, i in ids.items():
        if _encode(enlarged, text) != [i] or not pieces[i] or max(pieces[i]) >= old_rows:
            raise UserError(f"{tokenizer_path}: {text!r} cannot become a token with the id {i}; leave it out")
    return last_id, new_ids, pieces


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    tokenizer.no_truncation()
    return tokenizer.encode(text, add_special_tokens=False).ids


def _entries(new_ids: Mapping[str, int]) -> list[dict[str, Any]]:
    """The entries of tokens as in ``tokenizer.json``, with the rules of transformers' ``add_tokens``."""
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    return [{"id": i, "content": text, **form} for text, i in new_ids.items()]


def _resized_rows(
    folder: TensorFolder, name: str, num_used: int, pieces: Mapping[int, Sequence[int]]
) -> Callable[[MatrixRegion], Tensor]:
    """Reads regions of a matrix with the rows of ``pieces``, and as many rows below as are asked for.

    Args:
        num_used: number of rows that have a token, of which further rows are the mean.
    """
    old_rows, cols = matrix_shape(folder.shape(name))
    dtype = any_dtype(folder, name)
    total = torch.zeros(cols, dtype=torch.float64)
    for region in row_regions((num_used, cols), 8):
        total += folder.read_region(name, region).double().sum(0)
    mean_row = (total / num_used).to(dtype)

    def mean_of(piece_ids: Sequence[int]) -> Tensor:
        rows = [folder.read_region(name, MatrixRegion(i, i + 1, 0, cols)).float() for i in piece_ids]
        return torch.cat(rows).mean(0).to(dtype)

    new_rows = {i: mean_of(piece_ids) for i, piece_ids in pieces.items()}

    def read_region(region: MatrixRegion) -> Tensor:
        rows = mean_row.repeat(region.row_end - region.row, 1)
        if region.row < old_rows:
            kept = folder.read_region(name, region._replace(row_end=min(region.row_end, old_rows)))
            rows[: len(kept)] = kept
        for i in new_rows.keys() & range(region.row, region.row_end):
            rows[i - region.row] = new_rows[i]
        return rows

    return read_region


def _set_rows(config: dict[str, Any], rows: int) -> None:
    for section in (config, config.get("text_config")):
        if isinstance(section, dict) and "vocab_size" in section:
            section["vocab_size"] = rows


def _write_tokens(folder: Path, new_ids: Mapping[str, int]) -> None:
    """Adds tokens to all files of a tokenizer that list them."""
    entries = _entries(new_ids)
    by_id = {str(e["id"]): {key: value for key, value in e.items() if key != "id"} for e in entries}
    _edit_json(folder / "tokenizer.json", lambda fields: fields["added_tokens"].extend(entries))
    _edit_json(
        folder / "tokenizer_config.json", lambda fields: fields.get("added_tokens_decoder", {}).update(by_id)
    )
    _edit_json(folder / "added_tokens.json", lambda fields: fields.update(new_ids))


def _edit_json(path: Path, edit: Callable[[Any], object]) -> None:
    if path.is_file():
        fields = json.loads(path.read_text(encoding="utf-8"))
        edit(fields)
        path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
