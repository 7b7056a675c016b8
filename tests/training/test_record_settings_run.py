"""A step on records with limits, clips, times, late system turns, and arguments of the template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from data_tools.sample_sizes import index_datasets
from megatron_vl.config import DataConfig
from megatron_vl.data.sample.chat_template import TOOLS_TEMPLATE
from megatron_vl.spec.families import read_spec
from megatron_vl.weights.trained_media import trained_facts
from tests.data.datasets import converted
from tests.data.test_medium_limits import records
from tests.data.test_roles import ASK, DRAWN, ORDERS, SAY, call
from tests.support.tiny_run import metrics, prepare, trained
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.ranks

NUMBERED = {"add_vision_id": True}


def test_every_record_is_trained_on(tmp_path: Path) -> None:
    hf = tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32)
    prepared = prepare(tmp_path / "prepared", hf, samples=4)
    seen = [
        *records(tmp_path / "media"),
        *({"messages": messages} for messages in ORDERS.values()),
        {
            "images": ["a.png"],
            "messages": [ASK, call({"x": 0.1}), {**DRAWN, "content": "<image>?"}, SAY, ASK],
        },
        {"messages": [ASK, SAY], "chat_template_kwargs": {"add_vision_id": False}},
    ]
    path, report = converted(tmp_path, seen)
    assert (report.samples, report.unfinished_turns) == (len(seen), 1)
    data = {"chat_template": TOOLS_TEMPLATE, "template_arguments": NUMBERED}
    index_datasets(DataConfig(path=str(path), **data), read_spec(hf), hf)

    options = ["--data.path", str(path), "--data.seq_len", "2048", "--data.num_workers", "0"]
    options += ["--data.chat_template", TOOLS_TEMPLATE, "--data.template_arguments", json.dumps(NUMBERED)]
    options += ["--log.samples", "true"]
    run = tmp_path / "run"
    trained(prepared, run, *options, ranks=1, steps=3)
    keys = {key for line in metrics(run, "samples.jsonl") for row in line["rows"] for key in row}
    assert keys == {f"{number:09d}" for number in range(len(seen))}
    assert all(line["loss"] > 0 for line in metrics(run)) and not (run / "quarantine.jsonl").exists()
    step = max(run.glob("step_*"))
    assert trained_facts(step / "weights", {})["template_arguments"] == NUMBERED
