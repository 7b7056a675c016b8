"""The benchmark counts what it ran, its parts lie where they should, and FSDP2 trains the same model."""

import contextlib
import io
import itertools
import json
import subprocess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_vl.config import DataConfig, TrainConfig
from megatron_vl.data.sample.pixel_settings import PixelNorm
from megatron_vl.data.synthetic import SyntheticRows, draw_rows
from megatron_vl.estimate.flops import needed_flops, row_sizes
from megatron_vl.models.moe.router import iterate_routers
from megatron_vl.spec.families import read_spec
from megatron_vl.train import train
from tests.support import ranks
from tests.support.ranks import in_ranks
from tests.support.tiny_run import prepare
from toolkit.bench import command
from toolkit.bench.measure import Measure, measure_benchmark
from toolkit.bench.options import WARM_UP, parse_bench_options
from toolkit.cli import main
from toolkit.parity.reference import backward_mean_loss

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
    """Tokens, images and FLOPs of the rows after the warm-up, which are drawn here once more."""
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
                counted.append(needed_flops(spec, TrainConfig(), sizes))

        w = figures["workloads"][workload]
        seconds, total = w["step_s"] * TIMED, sum(row.total for row in model)
        assert w["tokens_per_s_per_rank"] * seconds * RANKS == pytest.approx(tokens)
        assert w["images_per_s"] * seconds == pytest.approx(sum(row.num_images for row in timed))
        assert w["mfu"] * seconds * RANKS * 0.5e12 == pytest.approx(total)
        assert w["vision_flops_share"] == pytest.approx(sum(row.tower for row in model) / total)
        assert w["mfu_all_tokens"] / w["mfu"] == pytest.approx(sum(row.total for row in all_tokens) / total)


@in_ranks()
def test_measured_speed_is_shown_if_a_later_step_fails(hf, tmp_path) -> None:
    words = f"--data.seq_len 256 --global_batch_size 1 --out {tmp_path}/figures.json --timed 1 --platform cpu"
    before_step = Measure.before_step

    def fail_in_text(measure: Measure, trainer: Any) -> None:
        before_step(measure, trainer)
        if measure.name == "text":
            raise RuntimeError("no memory")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(Measure, "before_step", fail_in_text)
        measure_benchmark(parse_bench_options(["--model.hf", str(hf), *words.split()]))
    assert json.loads((tmp_path / "figures.json").read_text())["workloads"].keys() == {"images"}


@pytest.mark.ranks
def test_parts_are_where_the_layout_puts_them(figures) -> None:
    first, last = figures["workloads"]["images"]["parts_by_stage"]
    assert all(first[f"vision {way}"] > 0 == last[f"vision {way}"] for way in ("forward", "backward"))
    # The whole tower is on the first stage, and the last one waits for it; loosely, on busy cores.
    assert last["idle"] > 0.1 * first["vision forward"]
    for stage in figures["workloads"]["data"]["parts_by_stage"]:
        assert all(stage[f"vision {part}"] > 0 for part in ("forward", "recompute", "backward", "exchange"))
    for name in ("images", "data"):
        for stage in figures["workloads"][name]["parts_by_stage"]:
            assert all(stage[f"language {way}"] > 0 for way in ("forward", "backward"))
            assert stage["optimizer"] > 0 and stage["gradient finalisation"] > 0
    assert figures["workloads"]["data"]["images_per_s"] > 0


@pytest.mark.full
@pytest.mark.parametrize(("family", "sync"), [("qwen2_5_vl", "every"), ("qwen3_vl", "last")])
@in_ranks(2)
def test_fsdp2_trains_the_same_model(hf, family: str, sync: str) -> None:
    """Loss and gradients are those of the plain Hugging Face model on the same samples, one by one."""
    from transformers import AutoModelForImageTextToText

    from benchmarks import fsdp2

    dist.init_process_group("gloo")
    options, given = fsdp2.read_options(["--model.hf", str(hf), "--gradient-sync", sync])
    spec = options.spec

    def drawn(rank: int) -> list:
        data = DataConfig(path="synthetic:images", seq_len=700, seed=rank)
        return list(itertools.islice(draw_rows(data, spec), 2))

    model = fsdp2.build(fsdp2.hf_config(options), torch.device("cpu"))
    trainer = fsdp2.Trainer(options, model, torch.device("cpu"), given.gradient_sync == "every")
    rows = [fsdp2.hf_row(samples, spec, 700) for samples in drawn(dist.get_rank())]
    loss = float(trainer.backward(rows))
    reference = AutoModelForImageTextToText.from_config(
        fsdp2.hf_config(options), dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in reference.named_buffers())
    named = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    reference.load_state_dict(named)
    samples = [sample for rank in range(dist.get_world_size()) for row in drawn(rank) for sample in row]
    expected = backward_mean_loss(reference, samples, spec, PixelNorm(mean=(0.5,) * 3, std=(0.5,) * 3))
    assert abs(loss - expected) / expected < 1e-6 and len(gradients) > 100
    for name, p in reference.named_parameters():
        if p.grad is not None and float(p.grad.norm()) > 1e-7:
            assert float((gradients[name] - p.grad).norm() / p.grad.norm()) < 1e-5, name
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["qwen3_vl_moe"])
@in_ranks()
def test_even_routing_chooses_experts_evenly(hf, family: str) -> None:
    """Without the option, a router that finds all experts equally good takes the same ones for each token."""
    loads: list[torch.Tensor] = []

    class Indifferent(Measure):
        def begin(self, trainer: Any) -> None:
            super().begin(trainer)
            for router in iterate_routers(trainer.model_chunks):
                router.weight.data.zero_()

        def end(self, trainer: Any, has_failed: bool) -> None:
            loads.extend(router.load for router in iterate_routers(trainer.model_chunks))

    shape = "--data.seq_len 256 --global_batch_size 1 --dtype float32 --platform cpu"
    words = f"--data.path synthetic:text --even-routing --timed 1 {shape}".split()
    bench_run = parse_bench_options(["--model.hf", str(hf), *words])
    train(bench_run.config, bench_run.spec, [Indifferent(bench_run)])
    assert loads and all(load.max() < 1.5 * load.float().mean() for load in loads), loads


def test_a_benchmark_that_was_killed_says_so(tiny_checkpoint, capsys, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -9))
    assert main(["bench", "--model.hf", str(tiny_checkpoint("qwen2_5_vl"))]) == 1
    assert "signal 9 ended the rank; if memory ran out, take fewer layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
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
