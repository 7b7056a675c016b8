"""A printed line holds the numbers of all ranks; lists come from the ranks that have some, and only then."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_vl.config import CheckpointConfig, DataConfig, LogConfig, TrainConfig
from megatron_vl.parallel.process_grid import make_grid
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.layout import make_layout
from megatron_vl.training.report import metrics
from megatron_vl.training.report.metrics import MetricsLog, StepMetrics, busiest_rank_load
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.step import NOT_FINITE, StepResult
from tests.support.ranks import in_ranks
from tests.support.tiny_run import metrics as read_lines
from tests.support.tiny_trainer import gather, join


def counted_step(number: int, dp_rank: int) -> StepBatch:
    """What the rows of a replica count in a step. Samples are dropped in step 2."""

    def sample(key: str, reason: str, data_set: str = "", size: int = 0) -> dict[str, Any]:
        where = {"key": key, "shard": "train-000000.tar", "source": "", "data_set": data_set}
        return where | {"reason": reason, "detail": "why", "size": size}

    dropped: list[dict[str, Any]] = []
    if dp_rank == 0:
        counts, lengths, wait = {"samples": 3, "images": 2, "patches": 64}, [[10, 20], [7]], 0.25
        if number == 2:
            counts |= {"dropped/medium missing": 4}
            dropped = [sample("d", "medium missing")]  # the row lists one of its four
    else:
        counts, lengths, wait = {"samples": 5, "images": 0, "patches": 0}, [[100], [1, 2, 3]], 0.75
        if number == 2:
            counts |= {"dropped/no tokens": 3, "dropped/medium missing": 1, "dropped/longer than seq_len": 1}
            dropped = [sample("a", "no tokens"), sample("b", "no tokens"), sample("c", "medium missing")]
            dropped += [sample("a", "no tokens"), sample("a", "longer than seq_len", "charts", 90)]
    first = {"lengths": lengths[0], "keys": [f"{dp_rank}.{number}.0"], "dropped": dropped, "counts": counts}
    second = {"lengths": lengths[1], "keys": [f"{dp_rank}.{number}.1"], "dropped": [], "counts": {}}
    common = {"vision_lengths": ([], []), "loss_tokens": 5}
    return StepBatch([], [common | first, common | second], wait)


@pytest.mark.parametrize("limit", [10_000, 1])
@in_ranks(4)
def test_line_adds_up_what_the_ranks_counted(hf, tmp_path: Path, limit: int) -> None:
    """Under TP2 x DP2. With little room for lists, each owner's next samples follow with the next lines."""
    platform, spec = join(), read_spec(hf)
    grid = make_grid(make_layout(spec, 2, 1, 1, None))
    config = TrainConfig(
        checkpoint=CheckpointConfig(dir=str(tmp_path)),
        log=LogConfig(samples=True),
        data=DataConfig(max_bad_share=0.0),
    )
    metrics.MAX_LISTED_SAMPLES = limit
    log = MetricsLog(config, spec, grid, platform)
    result = StepResult(loss=1.5, loss_tokens=20, grad_norm=0.5, skip_reason="")
    rates: Any = {"language": 0.1, "vision": 0.1, "merger": 0.1}
    lines = []
    for steps in ((1,), (2,), (3, 4), (5,)):
        for number in steps:
            log.add_step(counted_step(number, grid.dp_rank))
        lines.append(log.log_step(steps[-1], result, rates, {}, {}))
    log.close()

    names = ("samples", "images", "patches", "dropped")
    counts = [{name: n for name, n in line.items() if name.startswith(names)} for line in lines]
    dropped = {"dropped/medium missing": 5, "dropped/no tokens": 3, "dropped/longer than seq_len": 1}
    one_step = {"samples": 8, "images": 2, "patches": 64}
    two_steps = {name: 2 * n for name, n in one_step.items()}
    assert counts == [one_step, one_step | dropped, two_steps, one_step]
    assert [line["tokens_per_s_per_rank"] * 4 * line["step_s"] for line in lines] == pytest.approx([143] * 4)
    assert [line["data_wait_s"] for line in lines] == [0.75] * 4
    assert all(0 < line["memory_gib"] < 64 and line["vision_flops_share"] == 0 for line in lines)

    # The limit on bad samples stops all ranks together.
    problem = log.bad_sample_meter.stop_reason()
    assert len(set(gather(problem))) == 1 and "9 of 49 samples could not be used" in problem
    if limit > 1:
        assert "1 longer than seq_len (source charts)" in problem
        assert "; raise data.seq_len to 90 (" in problem

    if dist.get_rank() == 0:  # which serves the store
        store = dist.distributed_c10d._get_default_store()
        assert not any(store.check([f"megatron_vl/rank_0_gather/{number}/slots"]) for number in range(1, 5))
        assert [line["step"] for line in read_lines(tmp_path, "metrics.jsonl")] == [1, 2, 4, 5]
        listed = [
            (entry["step"], entry["key"], entry["reason"])
            for entry in read_lines(tmp_path, "quarantine.jsonl")
        ]
        a, b, c = ("a", "no tokens"), ("b", "no tokens"), ("c", "medium missing")
        d, long = ("d", "medium missing"), ("a", "longer than seq_len")
        each_once = [(2, *sample) for sample in (d, a, b, c, long)]
        assert listed == (each_once if limit > 1 else [(2, *d), (2, *a), (4, *b), (5, *c)])
        rows = [entry["rows"] for entry in read_lines(tmp_path, "samples.jsonl")]
        assert rows[0] == [["0.1.0"], ["0.1.1"], ["1.1.0"], ["1.1.1"]] and len(rows[2]) == 8


def test_step_fits_in_100_characters(capsys) -> None:
    """What does not fit follows in an indented line; nothing is lost."""
    log: Any = MetricsLog.__new__(MetricsLog)
    log.config, log.platform = TrainConfig(steps=40_000), SimpleNamespace(name="cuda")
    log.bad_sample_meter, log.printed_memory = SimpleNamespace(bad_count=3), ""
    numbers: dict[str, Any] = {"step": 39_999, "loss": 6.752725, "grad_norm": 18.64823, "step_s": 9.896}
    numbers |= {"tokens_per_s_per_rank": 10390.4, "tflops_per_rank": 530.0, "mfu": 0.5391, "data_wait_s": 0.2}
    numbers |= {f"lr/{part}": 5.5e-6 for part in ("language", "vision", "merger")} | {"memory_gib": 111.04}
    log._print_line(numbers, "", "")
    assert capsys.readouterr().out == (
        "step 39999/40000 | loss 6.752725 | grad 18.65 | lr 5.50e-06 | 9896 ms | 10390 tok/s/GPU |"
        " MFU 53.9%\n    111.0 GiB | dropped 3\n"
    )
    numbers |= {"lr/language": None, "lr/vision": 2e-6, "mfu": None, "data_wait_s": 1.5, "step_s": 12.34}
    numbers |= {"expert_load": 3.44, "expert_rank_load": 1.2}
    log._print_line(numbers, "charts 0.8 (1.2k, 45.1k) | holidays 1.4 (403, 9.7k)", NOT_FINITE)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100 and "GiB" not in printed, "printed when the peak grows"
    for part in ("SKIPPED: ", "lr 2.00e-06", "12.3 s", "530.0 TFLOP/s", "data wait 1500 ms", "rank 1.20x"):
        assert part in printed, part
    assert "expert 3.44x" in printed and "charts 0.8 (1.2k, 45.1k)" in printed and "dropped 3" in printed


@in_ranks()
def test_reduced_integers_stay_integers() -> None:
    device = join().device
    metrics = StepMetrics(num_real_tokens=2**53 - 1, language_flops=0.1, data_wait_s=0.3)
    total = metrics.reduce_over_ranks(device)
    assert (total.num_real_tokens, total.language_flops, total.data_wait_s) == (2**53 - 1, 0.1, 0.3)
    assert [type(value) for value in vars(total).values()] == [float] * 2 + [int] * 6 + [float] * 2


def test_load_of_the_busiest_rank() -> None:
    """Ranks of [3 + 1, 0 + 0] and [1 + 2, 3 + 2] tokens: 4 / 2 and 5 / 4, on average 1.625."""
    expert_tokens = torch.tensor([[3.0, 1.0, 0.0, 0.0], [1.0, 2.0, 3.0, 2.0]])
    assert busiest_rank_load(expert_tokens, 2) == 1.625
    assert busiest_rank_load(expert_tokens, 4) == (3 + 1.5) / 2
