"""A run over a blend counts by source, goes on with a changed blend, and moves between layouts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data_tools.sample_sizes import index_datasets
from megatron_vl.config import DataConfig
from megatron_vl.spec.families import read_spec
from tests.data.datasets import converted
from tests.data.mixtures import talk, write
from tests.data.pair_tars import index, write_pair_tars
from tests.data.test_documents import documents
from tests.support.tiny_run import metrics, prepare, trained, trainings
from tests.tiny import tiny_checkpoint
from toolkit.checkpoint.rollback import roll_back

pytestmark = pytest.mark.ranks

OPTIONS = ["--data.num_workers", "0", "--checkpoint.keep", "0", "--checkpoint.interval", "1"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("blend")
    for name in ("birds", "ships", "other"):
        shutil.move(converted(folder / f"in_{name}", talk(name, 20))[0], folder / name)
    hf = tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32)
    for name in ("birds", "ships", "other"):
        index_datasets(DataConfig(path=str(folder / name)), read_spec(hf), hf)
    return prepare(folder / "prepared", hf, samples=4) | {"sets": folder}


def seen(line: dict[str, Any], what: str) -> dict[str, Any]:
    """A number of each source in a line."""
    return {name.split("/")[1]: value for name, value in line.items() if name.endswith(f"/{what}")}


def check_sums(before: dict[str, Any], line: dict[str, Any]) -> None:
    """Asserts that samples, loss tokens and losses of the sources add up to those of the step."""
    for what, total in (("samples_seen", "samples"), ("loss_tokens_seen", "loss_tokens")):
        former = seen(before, what)
        assert sum(n - former.get(name, 0) for name, n in seen(line, what).items()) == line[total]
    former, now, losses = seen(before, "loss_tokens_seen"), seen(line, "loss_tokens_seen"), seen(line, "loss")
    loss = sum((now[name] - former.get(name, 0)) * (losses[name] or 0.0) for name in now)
    assert loss / line["loss_tokens"] == pytest.approx(line["loss"], rel=1e-6)


def test_run_counts_through_a_changed_blend_and_back(prepared: dict[str, Path], tmp_path: Path) -> None:
    sets, run = prepared["sets"], tmp_path / "run"
    first = write(sets, "first.yaml")
    ships, other = {"path": "ships", "weight": 2}, {"path": "other"}
    second = write(sets, "second.yaml", train={"blend": [other, ships]})

    def start(blend: Path, steps: int) -> tuple[Path, list[str]]:
        return run, [*OPTIONS, "--data.path", str(blend), "--stop_after", str(steps)]

    begun, went_on = trainings(prepared, start(first, 2), start(second, 4))
    lines = metrics(run)
    saved = json.loads((run / "step_00000004" / "run.json").read_text())["sources"].values()
    roll_back(run, 2)
    [back] = trainings(prepared, start(first, 3))
    lines += metrics(run)[2:]
    assert "source birds: weight 3, 20 samples, 75.0% of the samples expected" in begun
    assert "birds is left out; its position and counts are kept" in went_on
    assert "ships continues: weight 1 (25.0%) becomes weight 2 (66.7%)" in went_on
    assert "has changed" not in back, "the checkpoint of step 2 has the first blend"
    assert "step 3" in back, back

    assert [line["step"] for line in lines] == [1, 2, 3, 4, 3]
    one, two, three, four, again = lines
    for before, line in (({}, one), (one, two), (two, three), (three, four), (two, again)):
        check_sums(before, line)
    assert set(seen(three, "loss")) == {"ships", "other"} and set(seen(again, "loss")) == {"birds", "ships"}

    # Every sample can be used, so those in rows are all that a pass counts: also right after each resume.
    for line in lines:
        assert seen(line, "passes") == {name: n / 20 for name, n in seen(line, "samples_seen").items()}

    # In step 1, birds 1, 2, 6, 8, 8, 10, 13 and 13, and ships 5, 10, 14 and 15, of 20 samples each.
    # "birds 1." has 9 loss tokens with its end, "ships 5." has 8, and a number of two digits one more.
    birds, ships_loss = (seen(one, "loss")[name] for name in ("birds", "ships"))
    assert seen(one, "loss_tokens_seen") == {"birds": 5 * 9 + 3 * 10, "ships": 8 + 3 * 9}
    assert f"birds {birds:.4f} (8, 75, 0.40 passes) | ships {ships_loss:.4f} (4, 35, 0.20 passes)" in begun

    counts = {entry["name"]: (entry["samples"], entry["loss_tokens"]) for entry in saved}
    assert counts["birds"] == (seen(two, "samples_seen")["birds"], seen(two, "loss_tokens_seen")["birds"])
    assert counts["other"] == (seen(four, "samples_seen")["other"], seen(four, "loss_tokens_seen")["other"])


PARTS = "--data.num_workers 0 --checkpoint.interval 2 --log.samples true --data.seq_len 64".split()


def samples(run: Path) -> dict[int, list[str]]:
    return {line["step"]: sorted(sum(line["rows"], [])) for line in metrics(run, "samples.jsonl")}


def test_documents_pairs_and_conversations_survive_changes_of_layout(tmp_path: Path) -> None:
    hf = tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32)
    prepared = prepare(tmp_path / "prepared", hf, samples=12)
    path = converted(tmp_path, documents(tmp_path))[0]
    texts = [{"text": f"Text {i}. " + "word " * (9 * i)} for i in range(6)]
    written = converted(tmp_path / "written", texts)[0].rename(tmp_path / "texts")
    for folder in (path, written):
        index_datasets(DataConfig(path=str(folder)), read_spec(hf), hf)
    write_pair_tars(tmp_path / "tars", tars=2, pairs=6)
    index(tmp_path / "pairs", hf, tmp_path / "tars")
    weights = {path: 2, prepared["data"]: 4, tmp_path / "pairs": 6, written: 2}
    parts = [{"path": str(part), "weight": weight} for part, weight in weights.items()]
    options = [*PARTS, "--data.path", str(write(tmp_path, train={"blend": parts}))]
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
