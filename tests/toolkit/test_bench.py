"""The benchmark counts what it ran, its parts lie where they should, and FSDP2 trains the same model."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import subprocess

import pytest

from megatron_vl.config import DataConfig, LoraConfig, ModelConfig
from megatron_vl.data.synthetic import SyntheticRows
from megatron_vl.estimate.flops import needed_flops, row_sizes
from megatron_vl.spec.families import read_spec
from tests.support import ranks
from tests.support.ranks import call, run_module
from tests.support.tiny_run import prepare
from tests.toolkit.programs import benchmark_that_fails_in_text, busiest_experts
from toolkit.bench import command
from toolkit.bench.options import WARM_UP
from toolkit.cli import main

SEQ_LEN = 500
TIMED, ROWS, RANKS = 1, 2, 2


@pytest.fixture(scope="module")
def figures(tiny_checkpoint, tmp_path_factory) -> dict:
    """A pipeline of two stages: seeded rows, and a data set with a tower on every rank."""
    folder, hf = tmp_path_factory.mktemp("bench"), tiny_checkpoint("qwen2_5_vl")
    data = prepare(folder, hf)["data"]
    shape = f"--epochs 1 --timed {TIMED} --dtype float32 --data.seq_len {SEQ_LEN} --global_batch_size {ROWS}"
    layout = "--parallel.pp 2 --recompute.vision full --log.peak_tflops 0.5 --data.num_workers 1"
    words = [*f"bench --nproc-per-node {RANKS} {layout} {shape}".split(), "--model.hf", str(hf), "--out"]
    of_data = ["--data.path", str(data), "--vision.placement", "decoupled"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        patch.setattr(command, "run_group", ranks.run_group)
        assert main([*words, str(folder / "random.json")]) == 0, said.getvalue()
        assert "  images:\n" in said.getvalue() and "stage 1: " in said.getvalue()
        assert main([*words, str(folder / "data.json"), *of_data]) == 0, said.getvalue()
    found, of_data = (json.loads((folder / f"{name}.json").read_text()) for name in ("random", "data"))
    found["workloads"] |= of_data["workloads"]
    return found


@pytest.mark.ranks
def test_work_is_that_of_the_timed_rows(figures, tiny_checkpoint) -> None:
    """Checks tokens, images and FLOPs of the rows after the warm-up, which are drawn here once more."""
    spec = read_spec(tiny_checkpoint("qwen2_5_vl"))
    for workload in ("images", "text"):
        data = DataConfig(path=f"synthetic:{workload}", seq_len=SEQ_LEN)
        drawn = SyntheticRows(data, spec, 0, 1, ROWS)
        timed = list(itertools.islice(drawn, WARM_UP * ROWS, (WARM_UP + TIMED) * ROWS))
        tokens, model, all_tokens = 0, [], []
        for row in timed:
            lengths = row.cu_seqlens.diff().tolist()[: row.num_samples]
            bounds = (row.vision.cu_seqlens, row.vision.cu_window_seqlens)
            vision = [t.diff().tolist() if row.num_images else [] for t in bounds]
            tokens += sum(lengths)
            for counted, num_logits in ((model, int(row.loss_mask.sum())), (all_tokens, sum(lengths))):
                sizes = row_sizes(lengths, *vision, num_logits)
                counted.append(needed_flops(spec, ModelConfig(), LoraConfig(), sizes))

        w = figures["workloads"][workload]
        seconds, total = w["step_s"] * TIMED, sum(row.total for row in model)
        assert w["tokens_per_s_per_rank"] * seconds * RANKS == pytest.approx(tokens)
        assert w["images_per_s"] * seconds == pytest.approx(sum(row.num_images for row in timed))
        assert w["mfu"] * seconds * RANKS * 0.5e12 == pytest.approx(total)
        assert w["vision_flops_share"] == pytest.approx(sum(row.tower for row in model) / total)
        assert w["mfu_all_tokens"] / w["mfu"] == pytest.approx(sum(row.total for row in all_tokens) / total)


@pytest.mark.ranks
def test_measured_speed_is_shown_if_a_later_step_fails(tiny_checkpoint, tmp_path, monkeypatch) -> None:
    words = f"--data.seq_len 256 --global_batch_size 1 --out {tmp_path}/figures.json --timed 1 --platform cpu"
    options = ["--model.hf", str(tiny_checkpoint("qwen2_5_vl")), *words.split()]
    with pytest.raises(AssertionError, match="no memory for rows of text"):
        call(benchmark_that_fails_in_text, options=options)
    assert json.loads((tmp_path / "figures.json").read_text())["workloads"].keys() == {"images"}


@pytest.mark.ranks
def test_parts_are_where_the_layout_puts_them(figures) -> None:
    first, last = figures["workloads"]["images"]["parts_by_stage"]
    assert all(first[f"vision {way}"] > 0 == last[f"vision {way}"] for way in ("forward", "backward"))
    # The whole tower is on the first stage, and the last one waits for it; loosely, since others may use the
    # cores too.
    assert last["idle"] > 0.1 * first["vision forward"]
    for stage in figures["workloads"]["data"]["parts_by_stage"]:
        assert all(stage[f"vision {part}"] > 0 for part in ("forward", "recompute", "backward", "exchange"))
    for name in ("images", "data"):
        for stage in figures["workloads"][name]["parts_by_stage"]:
            assert all(stage[f"language {way}"] > 0 for way in ("forward", "backward"))
            assert stage["optimizer"] > 0 and stage["gradient finalisation"] > 0
    assert figures["workloads"]["data"]["images_per_s"] > 0


@pytest.mark.ranks
@pytest.mark.full
def test_fsdp2_trains_the_same_model(tiny_checkpoint, tmp_path) -> None:
    """FSDP2, packing, checkpointing and gradient accumulation change neither loss nor any gradient."""
    folders = [str(tiny_checkpoint(family)) for family in ("qwen2_5_vl", "qwen3_vl")]
    done = run_module("tests.toolkit.fsdp2_gradients", [tmp_path / "out.json", *folders], ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    for result in json.loads((tmp_path / "out.json").read_text()).values():
        assert result["loss_error"] < 1e-6 and result["gradients"] > 100 and result["gradient_error"] < 1e-5


@pytest.mark.ranks
def test_even_routing_chooses_experts_evenly(tiny_checkpoint) -> None:
    """The busiest expert's tokens over the mean would be experts / top_k without the option."""
    busiest = call(busiest_experts, hf=str(tiny_checkpoint("qwen3_vl_moe")))
    assert busiest and max(busiest) < 1.5, busiest


def test_a_benchmark_that_was_killed_says_so(tiny_checkpoint, capsys, monkeypatch) -> None:
    """The kernel does so where memory ends, and nothing else is printed."""
    killed = subprocess.CompletedProcess([], -9)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: killed)
    assert main(["bench", "--model.hf", str(tiny_checkpoint("qwen2_5_vl"))]) == 1
    assert "signal 9 ended the rank; if memory ran out, take fewer layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--paralel.tp", "2"], "did you mean --parallel.tp"),
        (["--data.path", "synthetic:movies"], "synthetic:movies"),
        (["--parallel.tp", "2"], "do not divide the world size"),
        (["--timed", "0"], "argument --timed: 0 must be at least 1"),
        (["--even-routing"], "--even-routing is for models with experts"),
    ],
)
def test_bench_refuses_impossible_options(tiny_checkpoint, capsys, options, named) -> None:
    model = ["--model.hf", str(tiny_checkpoint("qwen2_5_vl"))]
    assert main(["bench", *model, "--nproc-per-node", "1", *options]) != 0
    assert named in capsys.readouterr().err
