"""Runs doctor on this machine, on intact and damaged data, checkpoints and runs, and on
a broken installation."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from converters.convert import convert_weights
from megatron_vl.config import TrainConfig, parse_config
from megatron_vl.planning.gpus import GpuInfo, parse_nvidia_smi
from megatron_vl.planning.memory import StageMemory, peak_stage_gib
from megatron_vl.spec.families import read_spec
from megatron_vl.training.resolve import resolve_run
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.weights.run_folder import Lineage, SavedCheckpoint
from tests.converters.peft_models import peft_folder
from tests.support.planned import estimate_stage_memory
from tests.support.ranks import python_path, run_module
from tests.training.small_run import prepare
from toolkit.doctor import Finding, ok_finding
from toolkit.doctor.command import print_findings
from toolkit.doctor.machine_checks import check_all_reduce, check_disk
from toolkit.doctor.run_checks import _check_first_row, _check_resume, check_checkpoint, check_data, check_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tiny_checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that can be started: YAML, model, weights, data."""
    folder = tmp_path_factory.mktemp("doctor") / "prepared"
    prepared = prepare(folder, tiny_checkpoint("qwen2_5_vl"))
    settings = {
        "model": {"hf": str(prepared["hf"]), "checkpoint": str(prepared["weights"])},
        "parallel": {"tp": 2, "pp": 2, "layers": [1, 3], "sequence_parallel": True},
        "data": {"path": str(prepared["data"]), "seq_len": 256, "num_workers": 1},
        "checkpoint": {"dir": str(folder / "run"), "interval": 5},
        "global_batch_size": 4,
        "dtype": "float32",
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return prepared | {"yaml": folder / "run.yaml"}


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.state for finding in findings}


def doctor(*words: str | Path, path: Path | None = None) -> tuple[int, dict[str, Any]]:
    """The command as a user starts it, with ``path`` in front of Python's path."""
    paths = [*([str(path)] if path else []), python_path()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "toolkit", "doctor", "--json", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.full
@pytest.mark.ranks
def test_a_run_that_can_start_and_a_broken_transformer_engine(run, tmp_path):
    """A package that fails at import, as Transformer Engine's parts do alone, is the only finding."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('Could not find `transformer-engine`.')\n")
    code, report = doctor("--config", run["yaml"], "--world-size", "4", "--", "--steps", "50", path=tmp_path)
    assert code == 1

    found = {finding["name"]: finding for finding in report["findings"]}
    broken = {name for name, finding in found.items() if finding["state"] == "broken"}
    # A real import of Megatron-core fails with it, and with that the modules cannot be built.
    assert broken == {"transformer engine", "megatron.core", "model is built"}
    assert "half installed" in found["transformer engine"]["found"]
    assert "pip uninstall" in found["transformer engine"]["advice"]

    spec = read_spec(run["hf"])
    config = parse_config(["--config", str(run["yaml"])])
    peak = max(stage["total"] for stage in report["memory_gib"])
    assert len(report["memory_gib"]) == 2
    assert peak == pytest.approx(peak_stage_gib(estimate_stage_memory(config, spec, 4)), abs=0.01)


@pytest.mark.ranks
def test_what_is_right_and_what_is_wrong_with_a_run(run, tmp_path):
    """Runs in this process and gives the same findings that the command prints."""
    good = check_run(["--config", str(run["yaml"])], None, [])
    assert set(states(good.findings).values()) == {"ok"}, [f for f in good.findings if f.state != "ok"]
    assert {"model is built", "rows", "start weights", "memory", "disk"} <= states(good.findings).keys()
    rows = next(f for f in good.findings if f.name == "rows").found
    assert "24 samples" in rows and "loss tokens of 256" in rows

    def broken(*options: str, world: int | None = None, gpus: list[GpuInfo] | None = None) -> dict[str, str]:
        report = check_run(["--config", str(run["yaml"]), *options], world, gpus or [])
        return {finding.name: finding.found for finding in report.findings if finding.state == "broken"}

    assert "lrr" in broken("--optimizer.lrr", "1")["config"]
    assert "do not divide the world size 6" in broken(world=6)["config"]
    assert "add up to 5" in broken("--parallel.layers", "[2,3]")["model and layout"]
    small = broken("--data.seq_len", "8", gpus=[GpuInfo(i, "small", 512, 0, "1") for i in range(4)])
    assert small.keys() == {"rows", "memory", "samples"}
    assert "samples in a row cannot be used" in small["rows"] and "the GPUs here have 0.5" in small["memory"]


@pytest.mark.ranks
def test_adapters_are_checked_and_built_with_their_own_rank(run, tmp_path, monkeypatch):
    """They are in PEFT's files, which a run converts. The modules equal those of the same fields."""
    peft = peft_folder(tmp_path / "peft", run["hf"], target_modules=["q_proj"])
    words, adapter = ["--config", str(run["yaml"])], ["--lora.adapter", str(peft)]
    given = ["--lora.rank", "4", "--lora.alpha", "6", "--lora.targets", "[q_proj]"]
    parameters = []
    for options in ([], given, adapter):
        built = run_module("toolkit.plan.dry_build", ["4", *words, *options])
        assert built.returncode == 0, built.stderr[-2000:]
        parameters.append(json.loads(built.stdout.splitlines()[-1])["parameters"])
    assert parameters[0] < parameters[1] == parameters[2]

    report = check_run([*words, *adapter], None, [])
    assert set(states(report.findings).values()) == {"ok"}, [f for f in report.findings if f.state != "ok"]
    assert report.memory_by_stage == check_run([*words, *given], None, []).memory_by_stage

    monkeypatch.setattr("toolkit.doctor.run_checks._check_build", lambda *_: ok_finding("model is built", ""))
    for options, message in (
        ([*adapter, "--lora.rank", "8"], f"the adapters in lora.adapter {peft} have 4"),
        ([*adapter, "--checkpoint.dir", ""], "are converted into checkpoint.dir; give that too"),
        (["--lora.adapter", str(tmp_path / "gone")], f"lora.adapter: {tmp_path / 'gone'} holds no weights"),
    ):
        findings = check_run([*words, *options], None, []).findings
        [refusal] = [finding.found for finding in findings if finding.state == "broken"]
        assert message in refusal


def test_a_missing_input_is_one_finding_with_the_runs_own_paths(run, monkeypatch):
    """The modules are not built here: that takes seconds and has nothing to do with the inputs."""
    monkeypatch.setattr("toolkit.doctor.run_checks._check_build", lambda *_: ok_finding("model is built", ""))

    def broken(*options: str) -> list[Finding]:
        found = check_run(["--config", str(run["yaml"]), *options], None, []).findings
        return [finding for finding in found if finding.state == "broken"]

    [data] = broken("--data.path", "nowhere")
    assert data.found.startswith("data.path nowhere does not exist") and "tokenizer" not in data.advice
    [weights] = broken("--model.checkpoint", "nowhere/weights")
    assert weights.found.startswith("model.checkpoint nowhere/weights does not exist")
    assert f"megatron-vl convert --hf {run['hf']} --out nowhere/weights writes them" in weights.advice
    # Two faults are two findings.
    both = broken("--data.path", "nowhere", "--model.checkpoint", "nowhere/weights")
    assert [finding.found.split()[0] for finding in both] == ["data.path", "model.checkpoint"]


@pytest.mark.parametrize("sized", [False, True], ids=["read", "sizes"])
def test_a_source_of_which_most_samples_would_be_left_out_is_found(run, monkeypatch, tmp_path, sized):
    monkeypatch.setattr("toolkit.doctor.run_checks._check_build", lambda *_: ok_finding("model is built", ""))
    data = shutil.copytree(run["data"], tmp_path / "data")
    if not sized:
        shutil.rmtree(data / ".nv-meta" / "sizes")

    def samples(seq_len: int) -> list[Finding]:
        words = ["--config", str(run["yaml"]), "--data.path", str(data), "--data.seq_len", str(seq_len)]
        found = check_run(words, None, []).findings
        return [finding for finding in found if finding.name == "samples"]

    [finding] = samples(50)
    assert finding.state == "broken"
    which = "samples of" if sized else "samples drawn from"
    assert f"17 of 24 {which} data would be left out: 17 longer than seq_len" in finding.found
    assert "Raise data.seq_len to 63 " in finding.advice
    assert samples(60) == []


def test_sizes_that_the_first_start_will_write_are_noted(run, tmp_path):
    bare = shutil.copytree(run["data"], tmp_path / "bare")
    shutil.rmtree(bare / ".nv-meta" / "sizes")
    [finding] = rows_of(run, "--data.path", str(bare))
    assert finding.state == "note" and "24 samples; the first row" in finding.found
    assert f"the sizes of the samples of {bare} are not known" in finding.found
    assert "megatron-vl data index" in finding.advice and not (bare / ".nv-meta" / "sizes").exists()


def test_samples_of_a_blend_are_those_of_its_sources(run, tmp_path):
    part = {"path": str(run["data"]), "weight": 1}
    parts = [part, part | {"subset": {"range": ["0%", "50%"]}}, part | {"weight": 0}]
    written = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(written | {"splits": {"train": {"blend": parts}}}))
    [finding] = rows_of(run, "--data.path", str(tmp_path / "blend.yaml"))
    assert finding.found.startswith("36 samples of 2 sources; the first row"), finding.found


def test_memory_is_that_of_the_share_that_auto_stands_for(run, monkeypatch):
    monkeypatch.setattr("toolkit.doctor.run_checks._check_build", lambda *_: ok_finding("model is built", ""))
    options = ["--config", str(run["yaml"]), "--optimizer.offload_fraction", "auto"]
    small = [GpuInfo(i, "small", 512, 0, "1") for i in range(4)]
    assert all(stage.host_bytes > 0 for stage in check_run(options, 4, small).memory_by_stage)
    assert all(stage.host_bytes == 0 for stage in check_run(options, 4, []).memory_by_stage)


def resolved(config: TrainConfig, step: int | None = None) -> ResolvedRun:
    """The run as it is only shown; with ``step``, one that resumes from that step."""
    run = resolve_run(config, config.parallel.tp * config.parallel.pp, show_only=True)
    if step is None:
        return run
    source = SavedCheckpoint(Path(config.checkpoint.dir), step, Lineage())
    return dataclasses.replace(run, run_start=dataclasses.replace(run.run_start, source_checkpoint=source))


def rows_of(run: dict[str, Any], *options: str) -> list[Finding]:
    config = parse_config(["--config", str(run["yaml"]), *options])
    return [_check_first_row(resolved(config))]


def test_nothing_is_said_of_gpus_about_a_run_on_cpu(run, monkeypatch):
    monkeypatch.setattr("toolkit.doctor.run_checks._check_build", lambda *_: ok_finding("model is built", ""))
    options = ["--config", str(run["yaml"]), "--parallel.layers", "auto"]

    def said(*more: str) -> dict[str, str]:
        return {f.name: f.found for f in check_run([*options, *more], 4, []).findings}

    assert "H200" in said()["speed"] and "fits H200" in said()["memory"]
    on_cpu = said("--platform", "cpu")
    assert "speed" not in on_cpu and "the fullest rank; the estimate is made for GPUs" in on_cpu["memory"]
    assert "decoder layers [2, 2] on 2 stages" in on_cpu["model and layout"]


def test_other_weights_and_a_missing_shard_are_found(run, tiny_checkpoint, tmp_path, monkeypatch):
    from toolkit.doctor.run_checks import _check_start_weights

    convert_weights(tiny_checkpoint("qwen2_5_vl", tied=True), tmp_path / "other")
    config = parse_config(["--config", str(run["yaml"]), "--model.checkpoint", str(tmp_path / "other")])
    [finding] = _check_start_weights(resolved(config))
    assert finding.state == "broken"
    assert "another model" in finding.found
    assert "both qwen2_5_vl, other sizes" in finding.found

    config = parse_config(["--config", str(run["yaml"]), "--model.checkpoint", str(run["hf"])])
    [finding] = _check_start_weights(resolved(config))
    assert finding.state == "broken" and f"`megatron-vl convert --hf {run['hf']} --out DIR`" in finding.found
    config = parse_config(["--config", str(run["yaml"]), "--model.checkpoint", str(tmp_path / "moved")])
    [finding] = _check_start_weights(resolved(config, step=7))

    assert finding.state == "ok" and "not needed: the run continues from its own checkpoint" in finding.found
    assert check_checkpoint(tmp_path / "other").state == "ok"
    file = next((tmp_path / "other").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    assert check_checkpoint(tmp_path / "other").state == "broken"


def test_experts_in_the_layout_and_a_run_that_is_done(run, monkeypatch):
    report = check_run(["--config", str(run["yaml"]), "--parallel.ep", "2"], 4, [])
    assert report.findings[0].found == "4 ranks: tp 2 x pp 2 x vpp 1 x dp 1, experts ep 2 x etp 1"

    for steps, state, said in (
        (7, "note", "step 7 of 7: nothing is left to do"),
        (8, "ok", "step 7; the run continues"),
    ):
        config = parse_config(["--config", str(run["yaml"]), "--steps", str(steps)])
        finding = _check_resume(resolved(config, step=7))[-1]
        assert finding.state == state and said in finding.found


def test_a_damaged_data_set_is_found(run, tmp_path):
    import shutil

    shutil.copytree(run["data"], tmp_path / "data")
    assert check_data(tmp_path / "data").state == "ok"
    next((tmp_path / "data").glob("*.tar")).write_bytes(b"")
    finding = check_data(tmp_path / "data")
    assert finding.state == "broken" and "has 0 bytes" in finding.found
    assert check_data(tmp_path).state == "broken"


def test_disk_that_is_too_small_or_not_there(tmp_path):
    assert check_disk(tmp_path / "new" / "folder", 1).state == "ok"
    assert check_disk(tmp_path, 1 << 60).state == "broken"


def test_gpus_as_nvidia_smi_lists_them():
    """Parses nvidia-smi's own CSV, with a GPU that has fallen off the bus."""
    text = (
        "0, NVIDIA H200, 143771, 4, 580.95.05\n1, NVIDIA H200, 143771, 70012, 580.95.05\n2, [Unknown Error], "
        "[N/A], [N/A], 1\n"
    )
    assert parse_nvidia_smi(text) == [
        GpuInfo(0, "NVIDIA H200", 143771, 4, "580.95.05"),
        GpuInfo(1, "NVIDIA H200", 143771, 70012, "580.95.05"),
    ]


@pytest.mark.ranks
def test_all_reduce_over_two_processes():
    finding = check_all_reduce(0)
    assert finding.state == "ok" and "gloo over 2 ranks: correct" in finding.found


def test_headings_of_the_memory_table_are_whole_in_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    print_findings([], SimpleNamespace(memory_by_stage=[StageMemory(pipeline_stage=0)]))
    out = capsys.readouterr().out
    assert all(
        word in out for word in ("in flight", "gradients", "optimizer", "activations", "workspace", "total")
    )
    assert "host" not in out
    print_findings(
        [],
        SimpleNamespace(
            memory_by_stage=[StageMemory(pipeline_stage=0, host_bytes=2.0**30), StageMemory(pipeline_stage=1)]
        ),
    )
    heading, first = (
        line for line in capsys.readouterr().out.splitlines() if line[2:7] in ("stage", "0    ")
    )
    assert [cell.strip() for cell in heading.split("┃")][-2] == "host"
    assert [cell.strip() for cell in first.split("│")][-2] == "1.0"
