"""A printed line holds the numbers of all ranks; lists come from the ranks that have some, and only then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.process import run_ranks, run_single

LINES = """
from pathlib import Path
import torch.distributed as dist
from megatron_vl.config import TrainConfig
from megatron_vl.models.families import read_spec
from megatron_vl.parallel.grid import init_distributed, make_grid
from megatron_vl.parallel.layout import make_layout
from megatron_vl.platform import get_platform
from megatron_vl.training import metrics
from megatron_vl.training.feed import StepData
from megatron_vl.training.step import StepResult
from tests.tiny import tiny_checkpoint

platform = get_platform("cpu")
init_distributed(platform)
spec = read_spec(tiny_checkpoint("qwen2_5_vl"))
grid = make_grid(make_layout(spec, 2, 1, 1, None))
config = TrainConfig()
config.checkpoint.dir, config.log.tensorboard, config.log.samples = FOLDER, "", True
metrics.LISTED_BYTES = LIMIT
log = metrics.MetricsLog(config, spec, grid, platform)

def sample(key, reason):
    return {"key": key, "shard": "train-000000.tar", "source": "", "reason": reason, "detail": "why"}

def step(number):
    first = grid.dp_rank == 0
    counts = {"samples": 3, "images": 2, "patches": 64} if first else {"samples": 5, "images": 0, "patches": 0}
    dropped = []
    if number == 2 and not first:
        counts |= {"dropped/no tokens": 2, "dropped/medium missing": 1}
        dropped = [sample("a", "no tokens"), sample("b", "no tokens"), sample("c", "medium missing")]
    if number == 2 and first:
        counts |= {"dropped/medium missing": 4}
        dropped = [sample("d", "medium missing")]  # the row lists one of its four
    lengths = [[10, 20], [7]] if first else [[100], [1, 2, 3]]
    keys = [[f"{grid.dp_rank}.{number}.0"], [f"{grid.dp_rank}.{number}.1"]]
    wait = 0.25 if first else 0.75
    return StepData([], counts, lengths, [([], []), ([], [])], [5, 5], keys, dropped, wait)

result = StepResult(loss=1.5, loss_tokens=20, grad_norm=0.5, updated=True)
lines = []
for line in ((1,), (2,), (3, 4), (5,)):
    for number in line:
        log.add(step(number))
    lines.append(log.write(line[-1], result, 0.1))
log.close()
everyone = [None] * 4
dist.all_gather_object(everyone, [{k: v for k, v in line.items() if k not in VARYING} for line in lines])
store = dist.distributed_c10d._get_default_store()
left = [store.check([f"megatron_vl/mailbox/{number}/slots"]) for number in range(1, 5)]
RESULT = {"lines": lines, "alike": all(other == everyone[0] for other in everyone), "left": left, "bad": log.meter.bad}
"""
VARYING = ["step_s", "tokens_per_s_per_rank", "tflops_per_rank", "mfu"]


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("limit", [4 << 20, 1])
def test_a_line_adds_up_what_the_ranks_counted(tmp_path: Path, limit: int) -> None:
    """TP2 x DP2. With little room for lists, each owner's next samples follow with the next lines."""
    out = run_ranks(4, LINES, FOLDER=str(tmp_path), LIMIT=limit, VARYING=VARYING)
    assert out["alike"]  # the limit on bad samples stops all ranks together
    lines = out["lines"]
    counts = [
        {k: v for k, v in line.items() if k.startswith(("samples", "images", "patches", "dropped"))}
        for line in lines
    ]
    assert counts == [
        {"samples": 8, "images": 2, "patches": 64},
        {"samples": 8, "images": 2, "patches": 64, "dropped/medium missing": 5, "dropped/no tokens": 2},
        {"samples": 16, "images": 4, "patches": 128},
        {"samples": 8, "images": 2, "patches": 64},
    ]
    assert out["bad"] == 7
    tokens = [line["tokens_per_s_per_rank"] * 4 * line["step_s"] for line in lines]
    assert tokens == pytest.approx([143] * 4)  # 30 + 7 and 100 + 6 a step
    assert [line["data_wait_s"] for line in lines] == [0.75] * 4
    assert all(0 < line["memory_gib"] < 64 and line["vision_flops_share"] == 0 for line in lines)
    assert [line["step"] for line in jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 4, 5]

    listed = [
        (entry["step"], entry["key"], entry["reason"]) for entry in jsonl(tmp_path / "quarantine.jsonl")
    ]
    a, b, c, d = ("a", "no tokens"), ("b", "no tokens"), ("c", "medium missing"), ("d", "medium missing")
    whole = [(2, *d), (2, *a), (2, *b), (2, *c)]
    assert listed == (whole if limit > 1 else [(2, *d), (2, *a), (4, *b), (5, *c)])

    rows = [[row for row in entry["rows"]] for entry in jsonl(tmp_path / "samples.jsonl")]
    assert rows[0] == [["0.1.0"], ["0.1.1"], ["1.1.0"], ["1.1.1"]]
    assert len(rows[2]) == 8
    assert out["left"] == [False] * 4


TALLY = """
import torch
from megatron_vl.parallel.grid import init_distributed
from megatron_vl.platform import get_platform
from megatron_vl.training.tally import Tally
platform = get_platform("cpu")
init_distributed(platform)
total = Tally(tokens=2**53 - 1, language_flops=0.1, data_wait_s=0.3).reduced(platform.device)
RESULT = [total.tokens, total.language_flops, total.data_wait_s, [type(v).__name__ for v in vars(total).values()]]
"""


def test_integers_stay_integers() -> None:
    tokens, flops, wait, types = run_single(TALLY)
    assert (tokens, flops, wait) == (2**53 - 1, 0.1, 0.3)
    assert types == ["float", "float", "int", "int", "int", "int", "int", "int", "float", "float"]
