"""A printed line holds the numbers of all ranks; lists come from the ranks that have some, and only then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.ranks import call
from tests.training.programs import printed_lines, tally_of_one_rank

pytestmark = pytest.mark.ranks


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("limit", [4 << 20, 1])
def test_a_line_adds_up_what_the_ranks_counted(tiny_checkpoint, tmp_path: Path, limit: int) -> None:
    """Under TP2 x DP2 with little room for lists, each owner's next samples follow with the next lines."""
    out = call(printed_lines, 4, hf=str(tiny_checkpoint("qwen2_5_vl")), folder=str(tmp_path), limit=limit)
    assert out["alike"]  # the limit on bad samples stops all ranks together
    lines = out["lines"]
    counts = [
        {k: v for k, v in line.items() if k.startswith(("samples", "images", "patches", "dropped"))}
        for line in lines
    ]

    assert counts == [
        {"samples": 8, "images": 2, "patches": 64},
        {"samples": 8, "images": 2, "patches": 64, "dropped/medium missing": 5, "dropped/no tokens": 3}
        | {"dropped/longer than seq_len": 1},
        {"samples": 16, "images": 4, "patches": 128},
        {"samples": 8, "images": 2, "patches": 64},
    ]
    assert out["bad"] == 9 and "9 of 49 samples could not be used" in out["problem"]
    if limit > 1:
        assert "1 longer than seq_len (source charts)" in out["problem"]
        assert "; raise data.seq_len to 90 (" in out["problem"]

    tokens = [line["tokens_per_s_per_rank"] * 4 * line["step_s"] for line in lines]
    assert tokens == pytest.approx([143] * 4)  # 30 + 7 and 100 + 6 a step
    assert [line["data_wait_s"] for line in lines] == [0.75] * 4
    assert all(0 < line["memory_gib"] < 64 and line["vision_flops_share"] == 0 for line in lines)
    assert [line["step"] for line in jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 4, 5]

    listed = [
        (entry["step"], entry["key"], entry["reason"]) for entry in jsonl(tmp_path / "quarantine.jsonl")
    ]
    a, b, c, d = ("a", "no tokens"), ("b", "no tokens"), ("c", "medium missing"), ("d", "medium missing")
    whole = [(2, *d), (2, *a), (2, *b), (2, *c), (2, "a", "longer than seq_len")]  # each of them once

    assert listed == (whole if limit > 1 else [(2, *d), (2, *a), (4, *b), (5, *c)])

    rows = [[row for row in entry["rows"]] for entry in jsonl(tmp_path / "samples.jsonl")]
    assert rows[0] == [["0.1.0"], ["0.1.1"], ["1.1.0"], ["1.1.1"]]
    assert len(rows[2]) == 8
    assert out["left"] == [False] * 4


def test_integers_stay_integers() -> None:
    tokens, flops, wait, types = call(tally_of_one_rank)
    assert (tokens, flops, wait) == (2**53 - 1, 0.1, 0.3)
    assert types == ["float", "float", "int", "int", "int", "int", "int", "int", "float", "float"]
