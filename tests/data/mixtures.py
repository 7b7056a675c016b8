"""Data sets that are mixed, for the tests: two to blend, and a third one."""

import json
from pathlib import Path
from typing import Any

import yaml

from megatron_vl.config import DataConfig
from megatron_vl.data.source.dataset_description import read_description
from tests.tiny import tiny_checkpoint

from .datasets import open_loader

WRITTEN: dict[str, Any] = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}


def talk(name: str, count: int) -> list[dict[str, Any]]:
    turns = lambda i: [{"from": "human", "value": f"{name} {i}?"}, {"from": "gpt", "value": f"{name} {i}."}]  # noqa: E731
    return [{"conversations": turns(i)} for i in range(count)]


def write(folder: Path, file: str = "meta.yaml", **changes: Any) -> Path:
    """Birds 3 to ships 1; ``changes`` replace the train split or fields of its parts. Val is birds."""
    weights = {"birds": 3, "ships": 1}
    blend = [{"path": name, "weight": weights[name], **changes.get(name, {})} for name in weights]
    train = changes.get("train", {"blend": blend})
    splits = {"train": train} | ({"val": {"path": "birds"}} if (folder / "birds").exists() else {})
    (folder / file).write_text(yaml.safe_dump(WRITTEN | {"splits": splits}))
    return folder / file


def identity(path: Path, split: str = "train") -> Any:
    return json.loads(json.dumps(read_description(path).split_facts(split).dataset_identity))


def loader(path: Path, *, rank: int = 0, ranks: int = 1, rows_per_step: int = 0, **changes: Any) -> Any:
    hf = tiny_checkpoint("qwen2_5_vl")
    settings = {"seq_len": 64, "num_workers": 0, **changes}
    data = DataConfig(path=str(path), **settings)
    return open_loader(data, hf, dp_rank=rank, dp=ranks, rows_per_step=rows_per_step)
