"""A run over documents, text, pairs in tars and conversations moves between layouts, with parts of documents
on their way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_tools.sample_sizes import index_datasets
from megatron_vl.config import DataConfig
from megatron_vl.spec.families import read_spec
from tests.data.datasets import converted, turns
from tests.data.mixtures import write
from tests.data.pair_tars import index, write_pair_tars
from tests.data.test_documents import documents
from tests.support.tiny_run import metrics, prepare, trained, trainings
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.ranks

OPTIONS = "--data.num_workers 0 --checkpoint.interval 2 --log.samples true --data.seq_len 64".split()


def samples(run: Path) -> dict[int, list[str]]:
    return {line["step"]: sorted(sum(line["rows"], [])) for line in metrics(run, "samples.jsonl")}


def test_documents_pairs_and_conversations_survive_changes_of_layout(tmp_path: Path) -> None:
    hf = tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32)
    prepared = prepare(tmp_path / "prepared", hf, samples=12)
    path = converted(tmp_path, documents(tmp_path))[0]
    (tmp_path / "written").mkdir()
    texts = [{"text": f"Text {i}. " + "word " * (9 * i)} for i in range(6)]
    written = converted(tmp_path / "written", texts)[0].rename(tmp_path / "texts")
    for folder in (path, written):
        index_datasets(DataConfig(path=str(folder)), read_spec(hf), hf)
    write_pair_tars(tmp_path / "tars", tars=2, pairs=6)
    index(tmp_path / "pairs", hf, tmp_path / "tars")
    weights = {path: 2, prepared["data"]: 4, tmp_path / "pairs": 6, written: 2}
    parts = [{"path": str(part), "weight": weight} for part, weight in weights.items()]
    options = [*OPTIONS, "--data.path", str(write(tmp_path, train={"blend": parts}))]
    trained(prepared, tmp_path / "whole", *options, ranks=1)
    wanted = samples(tmp_path / "whole")
    assert len(wanted) == 6 and sum("#" in key for keys in wanted.values() for key in keys) > 12

    run = tmp_path / "run"
    for stop, layout in ((2, ["--parallel.cp", "2"]), (4, []), (6, ["--parallel.pp", "2"])):
        trained(prepared, run, *options, *layout, "--stop_after", str(stop), ranks=2)
    assert samples(run) == wanted
    losses = {line["step"]: line["loss"] for line in metrics(tmp_path / "whole")}
    for line in metrics(run):
        assert line["loss"] == pytest.approx(losses[line["step"]], rel=1e-4)
        assert {"source/out/loss", "source/data/loss_tokens_seen"} <= set(line)
    assert all(line[f"source/{name}/samples_seen"] > 0 for name in ("out", "texts", "pairs", "data"))
    assert {name: line[name] for name in line if "_seen" in name} == {
        name: value for name, value in metrics(tmp_path / "whole")[-1].items() if "_seen" in name
    }


def test_each_part_of_a_cut_record_is_trained_on_once_through_stops(tmp_path: Path) -> None:
    """Stops between the parts of a document with images and of a conversation change no loss of a pass."""
    prepared = prepare(tmp_path / "prepared", tiny_checkpoint("qwen2_5_vl", dtype=torch.float32), samples=4)
    exchanges = [turn for words in (15, 4, 12, 8, 13) for turn in turns(words)]
    records = [{"conversations": exchanges, "system": "No."}, *documents(tmp_path)[1:5]]
    path = converted(tmp_path, records)[0]
    index_datasets(DataConfig(path=str(path)), read_spec(prepared["hf"]), prepared["hf"])
    options = [*OPTIONS, "--data.path", str(path), "--epochs", "1", "--steps", "0"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    starts = [(run, ["--stop_after", "2"]), (run, ["--stop_after", "3"]), (run, []), (whole, [])]
    trainings(prepared, *((folder, [*options, *stop]) for folder, stop in starts))
    wanted = samples(whole)
    for step in (2, 3):
        is_before = {(key[:9], number <= step) for number, keys in wanted.items() for key in keys}
        assert {(f"00000000{i}", when) for i in (0, 1, 2, 4) for when in (True, False)} <= is_before
    parts = {"000000000": 5, "000000001": 3, "000000002": 3, "000000003": 5, "000000004": 4}
    once = [f"{key}#{part}" for key, count in parts.items() for part in range(1, count + 1)]
    assert sorted(sum(samples(run).values(), [])) == once and samples(run) == wanted
    assert [line["loss"] for line in metrics(run)] == [line["loss"] for line in metrics(whole)]
