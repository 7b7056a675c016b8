"""`megatron-vl train --data.path` on every form that the page of data names, up to the first row."""

from __future__ import annotations

import base64
import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_vl.config import parse_config
from megatron_vl.data.loader import build_loader
from megatron_vl.spec.families import read_spec
from tests.data.media import encoded
from tests.data_tools.test_formats import LISTED, SAME
from tests.tiny import tiny_checkpoint
from toolkit.train import prepare
from toolkit.train.options import TrainOptions

COUNT = 3
IMAGE_TOKENS = 6  # of 56 x 84 pixels: 4 x 6 patches, four to a token
PROMPT = [{"role": "user", "content": [*[{"type": "image"}] * 2, {"type": "text", "text": "First"}]}]
TRL = {"prompt": PROMPT, "completion": [{"role": "assistant", "content": "Yes."}], **LISTED}
URI = base64.b64encode(encoded(56, 84)).decode()
RECORDS: dict[str, dict[str, Any]] = {
    **SAME,
    "qwen": {**SAME["sharegpt"], "data_path": ""},
    "trl": TRL,
    "base64 alone": {**SAME["query"], "images": [URI, URI]},
}


def as_json(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        records = [RECORDS[name] | {"id": i} for i in range(COUNT)]
        (folder / "a.json").write_text(json.dumps(records))
        return folder / "a.json"

    return write


def json_lines() -> bytes:
    return b"".join(json.dumps(SAME["openai"] | {"id": i}).encode() + b"\n" for i in range(COUNT))


def as_lines(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(json_lines())
    return folder / "a.jsonl"


def as_gz(folder: Path) -> Path:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(json_lines()))
    return folder / "a.jsonl.gz"


def as_zst(folder: Path) -> Path:
    with pa.output_stream(str(folder / "a.jsonl.zst"), compression="zstd") as file:
        file.write(json_lines())
    return folder / "a.jsonl.zst"


def image_table() -> pa.Table:
    """Questions beside images as `datasets` stores them."""
    image = {"bytes": encoded(56, 84), "path": None}
    return pa.table({"question": ["First"] * COUNT, "answer": ["Yes."] * COUNT, "image": [image] * COUNT})


def as_parquet(folder: Path) -> Path:
    pq.write_table(image_table(), folder / "a.parquet")
    return folder / "a.parquet"


def as_saved_dataset(folder: Path) -> Path:
    datasets.Dataset(image_table()).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def as_arrow(folder: Path) -> Path:
    return next(as_saved_dataset(folder).glob("*.arrow")).rename(folder / "a.arrow")


def as_table(suffix: str, delimiter: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        with (folder / f"a{suffix}").open("w", newline="") as file:
            rows = [("question", "answer", "image"), *[("First", "Yes.", "a.png")] * COUNT]
            csv.writer(file, delimiter=delimiter).writerows(rows)
        return folder / f"a{suffix}"

    return write


def as_folder(folder: Path) -> Path:
    for i in range(COUNT):
        (folder / f"part{i}.json").write_text(json.dumps([SAME["openai"] | {"id": i}]))
    return folder


def as_index(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        as_json("sharegpt")(folder)
        columns = {"messages": "conversations", "images": "images", "system": "system"}
        entry = {"file_name": "a.json", "formatting": "sharegpt", "columns": columns}
        (folder / "dataset_info.json").write_text(json.dumps({"mine": entry}))
        return folder / f"dataset_info.json{name}"

    return write


COLUMNS = {"columns": "question=user,answer=assistant,image=image", "missing_markers": "first"}
FORMS: dict[str, tuple[Callable[[Path], Path], dict[str, str]]] = {
    **{name: (as_json(name), {}) for name in RECORDS},
    **{make.__name__: (make, {}) for make in (as_lines, as_gz, as_zst, as_folder)},
    **{make.__name__: (make, COLUMNS) for make in (as_parquet, as_arrow, as_saved_dataset)},
    "csv": (as_table(".csv", ","), COLUMNS),
    "tsv": (as_table(".tsv", "\t"), COLUMNS),
    "index": (as_index(""), {}),
    "a data set of the index": (as_index(":mine"), {}),
}


def written(form: str, folder: Path) -> tuple[Path, dict[str, str]]:
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(encoded(56, 84))
    write, options = FORMS[form]
    return write(folder), options


@pytest.mark.parametrize("form", FORMS)
def test_record_forms_become_rows(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("data_tools.worker_pool.default_workers", lambda: 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    records, options = written(form, tmp_path / "raw")
    hf = tiny_checkpoint("qwen2_5_vl")
    words = [f"--model.hf={hf}", f"--data.path={records}", "--data.num_workers=0", "--data.shuffle=false"]
    words = prepare.with_run_dir(words, parse_config(words))
    given = TrainOptions(fields=[], **options)
    config = parse_config(prepare.prepare_run(words, parse_config(words), given, is_first_node=True))

    loader = build_loader(config.data, read_spec(hf), hf, epochs=1)
    row = next(loader)
    loader.close()
    tokenizer = loader._planning_context.row_encoder.chat_encoder.tokenizer
    trained_text = tokenizer.decode(row.labels[row.loss_mask.bool()])
    answers = "Yes.<|im_end|>" if options or form == "trl" else "A cat.<|im_end|>Yes.<|im_end|>"
    assert trained_text == answers * COUNT
    image_tokens = COUNT * (1 if options else 2) * IMAGE_TOKENS
    text = tokenizer.decode(row.tokens)
    assert text.count("First") == COUNT and row.num_patches == 4 * image_tokens
    assert text.count("<|image_pad|>") == image_tokens
