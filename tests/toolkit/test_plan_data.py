"""``megatron-vl plan --data`` on data sets that ``data convert`` has written."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from megatron_vl.planning.predict import predict_layout
from megatron_vl.planning.row_statistics import RowShape, RowStatistics
from toolkit.plan.data_rows import measure_rows

from data_tools.convert import ConversionOptions
from data_tools.convert import convert_dataset as convert_data
from megatron_vl.config import TrainConfig, parse_config
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.layout import make_layout
from tests.training.small_run import prepare
from toolkit.cli import main

PATCHES = {4 * round((60 + 14 * (i % 5)) / 28) * round((80 + 28 * (i % 3)) / 28) for i in range(24)}
"""Of the pictures that :func:`prepare` draws: sides in units of 28 pixels, four patches a unit."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plan-data") / "prepared"
    return prepare(folder, tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32))


def run_of(prepared: dict[str, Path], *words: str) -> TrainConfig:
    small = ["--data.seq_len", "256"]
    own = ["--model.hf", str(prepared["hf"]), "--data.path", str(prepared["data"])]
    return parse_config([*own, *small, "--global_batch_size", "4", *words])


def test_what_is_measured_is_what_the_rows_hold(prepared: dict[str, Path]) -> None:
    run, spec = run_of(prepared), read_spec(prepared["hf"])
    rows = measure_rows(run, spec, 6)
    assert len(rows.row_shapes) == 6 and rows.is_sample and str(prepared["data"]) in rows.source_text
    assert {n for row in rows.row_shapes for n in row.frame_lengths} <= PATCHES and rows.mean_patches > 0
    assert all(sum(row.window_lengths) == sum(row.frame_lengths) for row in rows.row_shapes)
    assert all(
        row.pictures == len(row.frame_lengths) and sum(row.document_lengths) <= 256 for row in rows.row_shapes
    )
    assert 0 < rows.loss_tokens < rows.mean_tokens

    # After the time is over, two rows are enough, and the source says that there were to be more.
    few = measure_rows(run, spec, 6, max_seconds=0.0)
    assert few.row_shapes == rows.row_shapes[:2]
    assert "2 rows of" in few.source_text
    assert "more than 0 s for 6" in few.source_text


def test_limits_of_pixels_and_patches_count(prepared: dict[str, Path]) -> None:
    spec = read_spec(prepared["hf"])
    fewest = min(PATCHES)
    smaller = measure_rows(run_of(prepared, "--data.max_pixels", str(28 * 28 * 4)), spec, 4)
    assert max(n for row in smaller.row_shapes for n in row.frame_lengths) <= 16 < fewest + 9
    bounded = measure_rows(run_of(prepared, "--data.max_patches", "64"), spec, 4)
    assert 0 < bounded.most_patches <= 64


def test_a_data_set_without_pictures_has_no_tower_time(
    prepared: dict[str, Path], tmp_path: Path, capsys
) -> None:
    """Nor sizes, which are written first."""
    records = [
        {
            "conversations": [
                {"from": "human", "value": f"How many are {i} and {i}?"},
                {"from": "gpt", "value": f"{2 * i}."},
            ]
        }
        for i in range(24)
    ]
    (tmp_path / "text.json").write_text(json.dumps(records))
    options = ConversionOptions(out=tmp_path / "text", media_root=tmp_path, workers=1, val_fraction=0.0)
    convert_data([tmp_path / "text.json"], options)

    run, spec = run_of(prepared), read_spec(prepared["hf"])
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(tmp_path / "text")))
    rows = measure_rows(run, spec, 3)
    written = capsys.readouterr().err
    assert f"the sizes of the samples of {tmp_path / 'text'} are not known" in written
    assert "sizes of 24 samples" in written
    measure_rows(run, spec, 1)
    assert capsys.readouterr().err == "", "once"
    assert (
        rows.mean_patches
        == rows.pictures
        == rows.patch_spread
        == rows.patches_error
        == rows.most_patches
        == 0
    )
    text = predict_layout(run, spec, 1, make_layout(spec), row_statistics=rows)
    frozen = dataclasses.replace(run, model=dataclasses.replace(run.model, freeze_vision=True))
    assert (
        predict_layout(frozen, spec, 1, make_layout(spec), row_statistics=rows).timeline_seconds
        == text.timeline_seconds
    )
    pictures = measure_rows(run_of(prepared), spec, 3)
    assert (
        predict_layout(run, spec, 1, make_layout(spec), row_statistics=pictures).timeline_seconds
        > text.timeline_seconds
    )


def test_the_command_says_what_it_measured_and_how_well(prepared: dict[str, Path], capsys) -> None:
    words = ["plan", "--gpus", "1", "--gpu", "H200", "--data", str(prepared["data"]), "--rows", "5", "--json"]
    small = ["--hf", str(prepared["hf"]), "--data.seq_len", "256", "--global_batch_size", "4"]
    assert main([*words, *small]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows["rows"] == 5 and rows["source"] == f"5 rows of {prepared['data']}"
    patches = rows["patches"]
    assert patches["standard_error"] == pytest.approx(patches["spread"] / 2, abs=1e-3)


def test_the_error_by_hand() -> None:
    """Patches of 80 and 120: a spread of 20 %, and with five rows 20 % / sqrt(4)."""
    rows = tuple(RowShape((10,), (n,), (n,)) for n in (80, 120, 80, 120, 100))
    spread = math.sqrt(4 * 400 / 5) / 100
    assert RowStatistics("", rows, is_sample=True).patches_error == pytest.approx(spread / 2)
    assert RowStatistics("", rows).patches_error == 0.0
