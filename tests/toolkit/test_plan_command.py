"""``megatron-vl plan`` as a user calls it."""

import json
import re
from pathlib import Path

import pytest
import torch

from converters.convert import convert_adapter
from megatron_vl.config import parse_config
from megatron_vl.estimate.gpus import Gpu, find_gpu
from tests.converters.peft_models import peft_folder
from tests.support.planned import predict_run
from tests.tiny import tiny_checkpoint
from toolkit.bench.options import parse_bench_options
from toolkit.cli import main
from toolkit.common.options import parse_command_line
from toolkit.plan.command import make_plan
from toolkit.plan.options import PlanOptions

CONFIGS = Path(__file__).parents[1] / "hf_configs"
B7 = ["--hf", str(CONFIGS / "Qwen2.5-VL-7B-Instruct.json"), "--gpu", "H200"]
ROWS = ["--data.seq_len", "8192"]


def plan(capsys: pytest.CaptureFixture, *words: str, code: int = 0) -> dict:
    assert main(["plan", "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


def test_printed_options_are_the_planned_run(capsys) -> None:
    """A copied line is predicted as what it was printed for: recompute, offload and rows of a step too."""
    words = ["plan", *B7[:2], "--gpu", "A100", "--gpus", "1"]
    best = make_plan(parse_command_line(PlanOptions, words[1:], "plan")).chosen
    assert main(words) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith("first layout: --"))
    again = predict_run(parse_config(line.split()[2:]), best.spec, 1, find_gpu("A100"))
    assert "--optimizer.offload_fraction 1.0" in line
    assert (again.peak_gib, again.step_seconds) == (best.peak_gib, best.step_seconds)

    heading = next(line for line in said.splitlines() if "in flight" in line)
    cells = next(line for line in said.splitlines() if line.startswith("│ 0     │ 1 "))
    assert heading.count("┃") == cells.count("│") and "host" in heading and "…" not in heading


def test_adapters_of_an_earlier_run_are_planned_with_their_own_rank(capsys, tmp_path: Path) -> None:
    """In our files or in PEFT's."""
    hf = tiny_checkpoint("qwen2_5_vl", dtype=torch.float32)
    peft = peft_folder(tmp_path / "peft", hf, target_modules=["q_proj"])
    convert_adapter(peft, hf, tmp_path / "weights")
    words = ["--hf", str(hf), "--gpu", "H200", "--gpus", "1", "--parallel.tp", "1", "--data.seq_len", "4096"]
    given = ["--lora.rank", "4", "--lora.alpha", "6", "--lora.targets", "[q_proj]"]
    expected = plan(capsys, *words, *given)["own"]
    assert expected != plan(capsys, *words)["own"]

    settings = []
    for folder in (peft, tmp_path / "weights"):
        adapter = ["--lora.adapter", str(folder)]
        assert plan(capsys, *words, *adapter)["own"] == expected
        settings.append(parse_bench_options(["--model.hf", str(hf), *adapter]).config.lora)
        assert main(["plan", *words, *adapter, "--lora.rank", "8"]) == 1
        told = f"lora.rank is 8, but the adapters in lora.adapter {folder} have 4; leave the field out"
        assert told in capsys.readouterr().err
    assert settings[0] == settings[1]

    for command in (["plan", *words], ["bench", "--model.hf", str(hf), "--nproc-per-node", "1"]):
        assert main([*command, "--lora.adapter", f"{tmp_path}/gone"]) == 1
        told = f"lora.adapter: {tmp_path}/gone holds no weights.*give a run with LoRA or a folder of adapters"
        assert re.search(told, capsys.readouterr().err)


def test_given_layout_comes_first(capsys) -> None:
    words = ["--gpus", "4", *ROWS, "--global_batch_size", "12", "--recompute.vision", "full"]
    facts = plan(capsys, *B7, *words, "--parallel.pp", "4", "--parallel.layers", "[7,7,7,7]")
    assert facts["own"]["layout"]["layers"] == [7, 7, 7, 7]
    # Measured: 5,143 ms.
    assert facts["own"]["step_s"] == pytest.approx(5.143, rel=0.12)
    assert facts["layouts"][0]["step_s"] < facts["own"]["step_s"] and len(facts["layouts"]) == 8


def test_layout_may_be_given_by_a_default_value(capsys) -> None:
    """A user who compares CP1 with CP2 means one layout with both."""
    words = [*B7, "--gpus", "8", *ROWS, "--recompute.language", "full"]
    assert plan(capsys, *words)["own"] is None
    assert plan(capsys, *words, "--parallel.cp=1")["own"] is not None


def test_plan_names_what_would_fit_instead(capsys) -> None:
    words = [*B7, "--gpus", "2", *ROWS, "--parallel.pp", "2", "--parallel.layers", "[14,14]"]
    facts = plan(capsys, *words, code=1)
    assert not facts["own"]["fits"] and facts["layouts"][0]["fits"]
    assert main(["plan", *words]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "the run's own, does not fit: pp2" in said and "the run does not fit; what would: --" in said


def test_plan_names_the_largest_part_where_nothing_fits(capsys) -> None:
    def refused(hf: str, gpu: str, *words: str) -> str:
        assert main(["plan", "--hf", hf, "--gpus", "1", "--gpu", gpu, *words]) == 1
        return capsys.readouterr().err

    adapters, large = ("--lora.rank", "16"), str(CONFIGS / "Qwen2.5-VL-72B-Instruct.json")
    said = refused(large, "RTX 4090")
    assert "no layout of 1 RTX 4090 fits qwen2_5_vl with rows of 4096 tokens: the smallest, one GPU," in said
    assert "of 24 GiB, of which gradients 273: take more GPUs, or train adapters (--lora.rank 16)" in said
    remedy = "take more GPUs, or lower data.seq_len"
    assert f"weights 137: {remedy}" in refused(large, "RTX 4090", *adapters)
    assert f"{remedy} or data.max_patches" in refused(B7[1], "L40S", *adapters, "--data.seq_len", "131072")


def test_layout_without_host_memory_does_not_fit(capsys) -> None:
    """An H200 has room for DP8 without recompute only if 9.7 GiB of state are in host memory."""
    given = ["plan", *B7, *ROWS, "--gpus", "8", "--parallel.tp", "1", "--optimizer.offload_fraction", "1"]
    assert main([*given, "--host-memory", "80"]) == 0
    assert "host memory: 9.7 of 10.0 GiB" in capsys.readouterr().out
    facts = plan(capsys, *given[1:], "--host-memory", "72", code=1)
    assert not facts["own"]["fits"] and facts["own"]["host_gib"] == 9.7 and facts["layouts"][0]["fits"]
    assert main([*given, "--host-memory", "72"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "the run does not fit; what would: --recompute." in said
    assert "--optimizer.offload_fraction 0.0" in said


def test_plan_refuses_wrong_options(capsys, monkeypatch) -> None:
    for words, told in (
        (["--gpus", "2"], "no model is given"),
        ([*B7, "--gpus", "0"], "at least 1"),
        ([*B7[:2], "--gpus", "2", "--gpu", "A1000"], "GPU A1000 is unknown"),
        ([*B7[:2], "--gpus", "1", "--gpu", "A100", "--fp8.recipe", "delayed"], "Hopper or later, which A100"),
    ):
        assert main(["plan", *words]) in (1, 2)
        assert told in capsys.readouterr().err
    monkeypatch.setattr("toolkit.plan.command.local_gpu", lambda: Gpu(**vars(find_gpu()) | {"name": "RTX"}))
    assert main(["plan", *B7[:2], "--gpus", "8", "--fp8.recipe", "delayed"]) == 0
