"""The three stages of examples/pretrain one after the other, with a small model and data of their kinds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from converters.convert import convert_weights
from data_tools.sample_sizes import index_datasets
from megatron_vl.config import DataConfig
from megatron_vl.spec.families import read_spec
from megatron_vl.weights.weight_reader import WeightReader
from tests.data.datasets import converted
from tests.data.media import encoded, video, write
from tests.data.pair_tars import index, write_pair_tars
from tests.support.tiny_run import metrics
from tests.test_examples import run
from tests.tiny import tiny_checkpoint

STAGES = {
    "1_merger": {"captions"},
    "2_all": {"captions", "documents", "text", "conversations"},
    "3_long": {"long_documents", "video", "text", "conversations"},
}
"""Their data sets."""


def write_data(root: Path, hf: Path) -> None:
    """The data sets that the YAMLs name: tars, interleaved documents, text, conversations and videos."""
    write(root / "media/a.png", encoded(56, 84, "png"))
    write(root / "media/a.mp4", video(12, 56, 84))
    answer = {"from": "gpt", "value": "y"}
    document = {"texts": ["One.", None, "Two."], "images": [None, "a.png", None]}
    records: dict[str, dict[str, Any]] = {
        "documents": document,
        "text": {"text": "A text of many words."},
        "conversations": {
            "image": "a.png",
            "conversations": [{"from": "human", "value": "<image>?"}, answer],
        },
        "long_documents": {**document, "texts": ["One.", None, "long " * 60]},
        "video": {"video": "a.mp4", "conversations": [{"from": "human", "value": "<video>?"}, answer]},
    }
    for name, record in records.items():
        converted(root, [record] * 6)[0].rename(root / "data" / name)
        index_datasets(DataConfig(path=str(root / "data" / name)), read_spec(hf), hf)
    write_pair_tars(root / "tars", tars=2, pairs=6)
    index(root / "data/captions", hf, root / "tars")


def weights(folder: Path) -> dict[str, Tensor]:
    reader = WeightReader(folder)
    return {name: reader.read_shard(name).clone() for name in reader.tensor_infos}


@pytest.mark.full
def test_each_stage_starts_from_the_one_before(tmp_path: Path) -> None:
    hf = tiny_checkpoint("qwen2_5_vl", dtype=torch.float32)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "checkpoints/Qwen2.5-VL-3B-Instruct").symlink_to(hf)
    write_data(tmp_path, hf)
    convert_weights(hf, tmp_path / "start")

    def stage(name: str, *words: str) -> Any:
        options = "--platform cpu --dtype float32 --data.num_workers 0 --optimizer.warmup_steps 0 --steps 2"
        options += " --global_batch_size 2"
        example = f"pretrain/qwen2_5_vl_3b_{name}"
        return run("pretrain.sh", example, *options.split(), *words, folder=tmp_path, GPUS="1")

    early = stage("2_all", "--data.seq_len", "128")
    assert early.returncode == 1 and "runs/qwen2_5_vl_3b/1_merger" in early.stderr
    found = [weights(tmp_path / "start")]
    for name, seq_len in zip(STAGES, ("128", "128", "256"), strict=True):
        done = stage(name, "--data.seq_len", seq_len)
        assert done.returncode == 0, done.stderr[-3000:]
        folder = tmp_path / "runs/qwen2_5_vl_3b" / name
        lines = metrics(folder)
        assert [line["step"] for line in lines] == [1, 2] and all(
            math.isfinite(line["loss"]) for line in lines
        )
        sources = {key.split("/")[1] for key in lines[-1] if key.startswith("source/")}
        assert sources == (STAGES[name] if len(STAGES[name]) > 1 else set())
        found.append(weights(folder / "step_00000002/weights"))

    start, merger, whole, long = found
    for name in start:
        is_frozen = "merger" not in name
        assert torch.equal(merger[name], start[name]) == is_frozen, name
        for before, after in ((merger, whole), (whole, long)):
            moved = (after[name] - before[name]).abs().max()
            # At most one rate a step: 1e-5 of stage 2, where the merger alone moved by 1e-4.
            assert 0 < moved < 3e-5, name
        if not is_frozen:
            assert (merger[name] - start[name]).abs().max() > 9e-5, name
