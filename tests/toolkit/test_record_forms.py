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
from tests.support.ranks import run_module
from tests.tiny import tiny_checkpoint
from toolkit.train import prepare
from toolkit.train.options import TrainOptions

COUNT = 3
IMAGE_TOKENS = 6  # of 56 x 84 pixels: 4 x 6 patches, four to a token


def turns(i: int) -> tuple[str, str]:
    return f"Question {i}?", f"Answer {i}."


def sharegpt(i: int) -> dict[str, Any]:
    question, answer = turns(i)
    talk = [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": answer}]
    return {"id": f"s{i}", "image": "dot.png", "conversations": talk}


def openai(i: int) -> dict[str, Any]:
    question, answer = turns(i)
    parts = [{"type": "image", "image": "dot.png"}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def qwen(i: int) -> dict[str, Any]:
    return {**sharegpt(i), "data_path": ""}


def llamafactory_v1(i: int) -> dict[str, Any]:
    question, answer = turns(i)
    asked = [{"type": "image_url", "value": "dot.png"}, {"type": "text", "value": question}]
    answered = [{"type": "text", "value": answer}]
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


def alpaca(i: int) -> dict[str, Any]:
    question, answer = turns(i)
    return {"instruction": f"<image>{question}", "input": "", "output": answer, "images": ["dot.png"]}


def query(i: int) -> dict[str, Any]:
    question, answer = turns(i)
    return {"query": f"<image>{question}", "response": answer, "images": ["dot.png"]}


def trl(i: int) -> dict[str, Any]:
    question, answer = turns(i)
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    return {
        "prompt": prompt,
        "completion": [{"role": "assistant", "content": [{"type": "text", "text": answer}]}],
        "images": ["dot.png"],
    }


def pairs(i: int) -> dict[str, Any]:
    question, answer = turns(i)
    return {"conversation": [{"human": f"<image>{question}", "assistant": answer}], "images": ["dot.png"]}


def base64_alone(i: int) -> dict[str, Any]:
    return {**query(i), "images": [base64.b64encode(encoded(56, 84)).decode()]}


def as_json(make: Callable[[int], dict[str, Any]]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "a.json").write_text(json.dumps([make(i) for i in range(COUNT)]))
        return folder / "a.json"

    return write


def json_lines() -> bytes:
    return b"".join(json.dumps(sharegpt(i)).encode() + b"\n" for i in range(COUNT))


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
    columns = list(zip(*map(turns, range(COUNT)), strict=True))
    return pa.table({"question": columns[0], "answer": columns[1], "image": [image] * COUNT})


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
            rows = [("question", "answer", "image"), *((*turns(i), "dot.png") for i in range(COUNT))]
            csv.writer(file, delimiter=delimiter).writerows(rows)
        return folder / f"a{suffix}"

    return write


def as_folder(folder: Path) -> Path:
    for i in range(COUNT):
        (folder / f"part{i}.json").write_text(json.dumps([sharegpt(i)]))
    return folder


def as_index(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        as_json(sharegpt)(folder)
        columns = {"messages": "conversations", "images": "image"}
        entry = {"file_name": "a.json", "formatting": "sharegpt", "columns": columns}
        (folder / "dataset_info.json").write_text(json.dumps({"mine": entry}))
        return folder / f"dataset_info.json{name}"

    return write


COLUMNS = {"columns": "question=user,answer=assistant,image=image", "missing_markers": "first"}
FORMS: dict[str, tuple[Callable[[Path], Path], dict[str, str]]] = {
    **{
        make.__name__: (as_json(make), {})
        for make in (sharegpt, openai, qwen, llamafactory_v1, alpaca, query)
    },
    **{make.__name__: (as_json(make), {}) for make in (trl, pairs, base64_alone)},
    **{make.__name__: (make, {}) for make in (as_lines, as_gz, as_zst, as_folder)},
    **{make.__name__: (make, COLUMNS) for make in (as_parquet, as_arrow, as_saved_dataset)},
    "csv": (as_table(".csv", ","), COLUMNS),
    "tsv": (as_table(".tsv", "\t"), COLUMNS),
    "index": (as_index(""), {}),
    "a data set of the index": (as_index(":mine"), {}),
}


def written(form: str, folder: Path) -> tuple[Path, dict[str, str]]:
    (folder / "dot.png").write_bytes(encoded(56, 84))
    write, options = FORMS[form]
    return write(folder), options


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_rows(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    assert trained_text == "".join(f"{turns(i)[1]}<|im_end|>" for i in range(COUNT))
    text = tokenizer.decode(row.tokens)
    assert all(question in text for question, _ in map(turns, range(COUNT)))
    assert text.count("<|image_pad|>") == COUNT * IMAGE_TOKENS and row.num_patches == 4 * COUNT * IMAGE_TOKENS


@pytest.mark.parametrize("form", [form for form, (_, options) in FORMS.items() if options])
def test_table_without_options_is_refused_with_the_finished_ones(form: str, tmp_path: Path):
    records, options = written(form, tmp_path)
    columns, markers = options["columns"], options["missing_markers"]
    with pytest.raises(prepare.PrepareError, match=f"give --columns {columns} --missing-markers {markers}"):
        prepare.convert_once(records, tmp_path / "data", TrainOptions(fields=[]))


@pytest.mark.ranks
def test_folder_of_datasets_is_trained_on_by_one_command(tmp_path: Path):
    records, options = written("as_saved_dataset", tmp_path)
    command = ["train", "--model.hf", str(tiny_checkpoint("qwen2_5_vl"))]
    command += ["--data.path", str(records), "--columns", options["columns"], "--missing-markers", "first"]
    command += ["--global_batch_size", "1"]
    done = run_module("toolkit", command, cwd=tmp_path, is_group=False)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 records converted" in done.stderr and "step 1/1 | loss" in done.stdout
    assert (tmp_path / "runs/saved/step_00000001").is_dir()
