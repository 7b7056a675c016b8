"""``megatron-vl train``: its environment, what ``--dry-run`` prints, and the answers at the end of a run."""

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from converters.convert import convert_weights
from megatron_vl.config import RunConfigError, parse_config, validate_config
from megatron_vl.config.checks import check_export_weights
from megatron_vl.spec.families import read_spec
from megatron_vl.system.errors import UsageError
from tests.converters.peft_models import peft_folder
from tests.support.planned import planned_run
from tests.support.ranks import run_module
from tests.support.tiny_run import options_of, prepare
from toolkit.cli import main
from toolkit.train import command, dry_run
from toolkit.train.command import LaunchEnvironment, read_launch_environment
from toolkit.train.options import TrainOptions

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tests" / "hf_configs"
STEP = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "123456", "SLURM_PROCID": "9"}
STEP |= {"SLURM_STEP_NODELIST": "gpu[007-008]", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2"}


def test_ranks_of_torchrun_and_slurm_are_found():
    script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"}  # sbatch without srun
    assert read_launch_environment({}) == read_launch_environment(script) == LaunchEnvironment()
    assert read_launch_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}).is_rank
    step = STEP | {"SLURM_LOCALID": "1"}
    slurm = read_launch_environment(step)
    place = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert slurm.is_rank
    assert slurm.rank_variables == place | {"MASTER_ADDR": "gpu007", "MASTER_PORT": "23456"}
    given = read_launch_environment(step | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"})
    assert given.rank_variables["MASTER_ADDR"] == "10.0.0.1"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("node1,node2", "node1"), ("gpu[003-006,010]", "gpu003"), ("gpu[3,7]-ib,login", "gpu3-ib")],
)
def test_slurm_step_with_a_task_a_node_starts_the_ranks_of_its_node(nodelist, host):
    found = read_launch_environment(STEP | {"SLURM_STEP_NODELIST": nodelist, "SLURM_STEP_NUM_TASKS": "2"})
    assert found == LaunchEnvironment(nnodes=2, master_addr=host, master_port=23456, job_id="123456")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    """A model and a data set, as far as can be seen before a start: which files exist."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "data" / ".nv-meta").mkdir(parents=True)
    (folder / "config.json").write_bytes((CONFIGS / "Qwen2.5-VL-7B-Instruct.json").read_bytes())
    (folder / "model.safetensors").touch()
    return ["--model.hf", str(folder), "--data.path", str(folder / "data")]


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """The launcher's arguments; it starts nothing."""
    given: list[list[str]] = []
    monkeypatch.setattr("megatron_vl.launch.main", lambda words: given.append(words) or 7)
    for name in [name for name in os.environ if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE")]:
        monkeypatch.delenv(name)
    for name in command.GPU_ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # restored afterwards
    return given


def test_train_starts_the_ranks_of_one_node(started, inputs):
    layout = ["--parallel.tp", "2", "--steps", "3"]
    assert main(["train", "--nproc-per-node", "4", *inputs, *layout]) == 7
    group = ["--nnodes", "1", "--nproc-per-node", "4", "--standalone"]
    run_dir = "--checkpoint.dir=runs/data"  # with the name of the data set
    assert started == [[*group, "-m", "megatron_vl.train", *inputs, *layout, run_dir]]
    assert main(["train", "--nproc-per-node", "4", *inputs, *layout, "--checkpoint.dir", ""]) == 7
    assert run_dir not in started[1]


def test_train_starts_the_ranks_of_several_nodes(started, inputs, capsys, monkeypatch):
    nodes = ["train", "--nproc-per-node", "8", "--nnodes", "2", *inputs, "--global_batch_size", "16"]
    assert main(nodes) == 2 and "give --master-addr" in capsys.readouterr().err
    assert main([*nodes, "--master-addr", "192.0.2.1"]) == main([*nodes, "--master-addr", "192.0.2.1:5"]) == 7
    for words, endpoint in zip(started, ("192.0.2.1:29500", "192.0.2.1:5"), strict=True):
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "megatron-vl"]
        assert words[4:10] == meeting
    # Otherwise the launcher fails after the data were converted, and names nothing.
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody.invalid")
    assert main([*nodes, "--master-addr", "192.0.2.1"]) == 2
    assert "own name, nobody.invalid, leads to no address" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "host", "is_first"),
    [
        ("127.0.0.2", "head:29501", True),  # the name leads to another of this machine's addresses
        ("192.0.2.1", "head", False),  # kept for documentation, so it is no machine's
        (None, "head", None),  # a typing error: all nodes would wait for another one
        (None, "this-node", True),
    ],
)
def test_first_node_is_the_one_that_has_the_address(address, host, is_first, monkeypatch):
    """It converts the data and answers samples, wherever rank 0 is."""

    def look_up(name: str, _port: None) -> list[tuple]:
        assert name == "head"
        if address is None:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "this-node")
    options = TrainOptions(fields=[], nnodes=2, master_addr=host)
    if is_first is None:
        with pytest.raises(UsageError, match="--master-addr head cannot be found from this node"):
            command._is_first_node(options, LaunchEnvironment())
    else:
        assert command._is_first_node(options, LaunchEnvironment()) is is_first


@pytest.mark.parametrize("is_first", [True, False])
def test_answers_are_made_by_one_node_when_its_ranks_have_ended(started, inputs, monkeypatch, is_first):
    answered: list[list[str]] = []
    monkeypatch.setattr("megatron_vl.launch.main", lambda words: 0)
    monkeypatch.setattr(command, "_is_first_node", lambda *_: is_first)
    monkeypatch.setattr(command, "_answer_samples", lambda run_args, _: answered.append(run_args))
    words = [*inputs, "--steps", "3", "--global_batch_size", "16"]
    nodes = ["--nproc-per-node", "8", "--nnodes", "2", "--master-addr", "192.0.2.1"]
    assert main(["train", *nodes, *words]) == 0
    assert answered == ([[*words, "--checkpoint.dir=runs/data"]] if is_first else [])


def test_ranks_of_slurm_start_no_ranks_of_their_own(started, capsys, monkeypatch):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--nproc-per-node", "8", "--steps", "3"]) == 2
    assert "leave out --nproc-per-node" in capsys.readouterr().err and started == []


LARGE = ["--model.hf", str(CONFIGS / "Qwen2.5-VL-72B-Instruct.json"), "--data.seq_len", "8192"]
LARGE += ["--global_batch_size", "64", "--parallel.tp", "8", "--parallel.pp", "4"]
LARGE += ["--parallel.sequence_parallel", "true", "--parallel.layers", "[17,21,21,21]"]


@pytest.fixture
def large(monkeypatch, capsys) -> Callable[..., str]:
    monkeypatch.setattr("toolkit.train.dry_run._pass_text", lambda run: "")

    def printed(*words: str, ranks: int = 64) -> str:
        config = parse_config([*LARGE, *words])
        dry_run._print_run(planned_run(config, read_spec(config.model.hf), ranks), ranks)
        return capsys.readouterr().out

    return printed


def test_dry_run_shows_layout_and_memory(large):
    """By hand: 64 ranks are two replicas of 32 micro-batches."""
    printed = large()
    assert "on 64 ranks\n" in printed and " x dp 2, sequence parallel\n" in printed
    assert "32 micro-batches on each data-parallel rank" in printed
    assert "  stage 0: vision tower, embedding, decoder layers 0 to 16\n" in printed
    assert "  stage 3: decoder layers 59 to 79, output layer and loss\n" in printed
    # The second stage has decoder layers only: q, k, v and output of attention, MLP, over 8 ranks.
    layer = (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 29568) / 8
    assert re.search(rf"^│ 1 .* {2 * 21 * layer / 2**30:.2f} ", printed, re.MULTILINE)
    assert "\nfits: " in printed and "estimated on H200" in printed and "host memory: " not in printed
    assert "host memory: " in large("--optimizer.offload_fraction", "1")
    printed = large("--parallel.layers", "auto", "--platform", "cpu", ranks=32)
    assert "the estimate is made for GPUs" in printed
    assert "\nfits: " not in printed and "estimated on" not in printed


def test_dry_run_without_gpus_takes_as_few_ranks_as_the_layout_needs():
    assert dry_run._least_ranks(parse_config(LARGE), 1) == 32
    assert dry_run._least_ranks(parse_config([*LARGE, "--parallel.ep", "16"]), 3) == 22


@pytest.fixture(scope="module")
def prepared(tiny_checkpoint, tmp_path_factory) -> dict[str, Path]:
    return prepare(tmp_path_factory.mktemp("prepared") / "run", tiny_checkpoint("qwen2_5_vl"), samples=8)


@pytest.fixture(scope="module")
def peft(prepared, tmp_path_factory) -> Path:
    return peft_folder(tmp_path_factory.mktemp("peft"), prepared["hf"], target_modules=["q_proj"])


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        ("train --model.hf", "peft", "model.hf {} is a LoRA adapter (adapter_config.json): train it further"),
        ("train --model.checkpoint", "peft", "model.checkpoint {} is a LoRA adapter"),
        ("train --model.hf", "data", "model.hf {} is a data set: give it as --data.path"),
        ("train --data.path", "hf", "data.path {} is the folder of a model: give it as --model.hf"),
        ("generate --prompt Hello --checkpoint", "peft", "{} is a LoRA adapter"),
        ("convert --out out --hf", "peft", "{} is a LoRA adapter"),
    ],
)
def test_folder_of_another_kind_is_named(started, prepared, peft, capsys, tmp_path, words, kind, message):
    command_name, *options = words.split()
    folder = str({**prepared, "peft": peft}[kind])
    run = ["--nproc-per-node", "2", *options_of(prepared, tmp_path / "new")]
    assert main([command_name, *(run if command_name == "train" else ()), *options, folder]) == 1
    assert f"megatron-vl {command_name}: {message.format(folder)}" in capsys.readouterr().err
    assert started == []


def test_dry_run_makes_every_check_of_a_start(prepared, peft, tiny_checkpoint, capsys, tmp_path):
    """It leaves no file; the errors are those of a start."""
    words = ["train", "--dry-run", "--nproc-per-node", "2", *options_of(prepared, tmp_path / "new")]
    words += ["--parallel.pp", "2", "--parallel.layers", "[1,3]", "--global_batch_size", "64"]
    for options in ((), ("--lora.adapter", str(peft))):
        assert main([*words, *options]) == 0
        said = capsys.readouterr().out
        assert "  stage 0: vision tower, embedding, decoder layers 0 to 0\n" in said
        rows = re.search(r"one pass over the data is about (\d+) rows?", said)[1]
        assert f"; a step of 64 rows reads the data about {64 / int(rows):.1f} times" in said
        assert "fullest rank: " in said
        assert ("trained: " in said) == bool(options)
    assert main([*words, "--data.seq_len", "56"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"one pass .*; left out of \d+ samples: \d+ longer than seq_len\n", said)

    other = tmp_path / "other"
    convert_weights(tiny_checkpoint("qwen2_5_vl", tied=True), other)
    for options, message in (
        (["--model.hf", str(CONFIGS)], "holds no config.json"),
        (["--model.checkpoint", str(other)], "holds another model than model.hf"),
        (["--parallel.layers", "[2,3]"], "add up to 5"),
        (["--eval.interval", "2"], "the split 'val' is empty"),
        (["--lora.adapter", str(peft), "--lora.rank", "8"], f"the adapters in lora.adapter {peft} have 4"),
    ):
        assert main([*words, *options]) == 1, options
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_run_scores_itself_when_its_ranks_have_ended(ranks, tiny_checkpoint, tmp_path) -> None:
    """One rank, or two that the launcher starts: each sample once; white space does not count."""
    hf = tiny_checkpoint("qwen2_5_vl", dtype=torch.float32)
    prepared, run = prepare(tmp_path / "files", hf, samples=12, val_fraction=0.5), tmp_path / "run"
    words = ["--model.hf", str(hf), "--data.path", str(prepared["data"]), "--data.seq_len", "128"]
    words += ["--dtype", "float32", "--steps", "1", "--global_batch_size", "2", "--eval.answers", "2"]
    start = ["train", "--nproc-per-node", str(ranks), *words, "--checkpoint.dir", str(run)]
    done = run_module("toolkit", start, is_group=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    out = run / "hf" / "step_00000001_answers.jsonl"
    assert lines[-1] == f"0 of 2 answers (0.0%) equal their reference ({out})"
    assert lines.index(f"checkpoints in {run}: [1]") < len(lines) - 1, "the ranks have ended"
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(each.keys() == {"key", "prompt", "reference", "answer"} for each in answers)
    assert len({each["key"] for each in answers}) == 2
    assert (run / "hf" / "step_00000001" / "config.json").is_file()


def test_answers_are_made_of_a_finished_run_and_only_once(tmp_path: Path, monkeypatch: Any) -> None:
    class Replaced(Exception):
        """This process would be another program now."""

    monkeypatch.setattr(os, "execve", execve := Mock(side_effect=Replaced))
    run, step_dir = tmp_path / "run", tmp_path / "run" / "step_00000004"
    words = ["--checkpoint.dir", str(run), "--eval.answers", "3"]
    command._answer_samples(words, {})  # nothing is saved
    step_dir.mkdir(parents=True)
    (step_dir / "run.json").write_text(json.dumps({"fields": {"steps": 9}}))
    command._answer_samples(words, {})  # a signal has stopped it after step 4 of 9
    with pytest.raises(Replaced):
        command._answer_samples([*words, "--stop_after", "4"], {})

    (step_dir / "run.json").write_text(json.dumps({"fields": {"steps": 4}}))
    command._answer_samples(words[:2], {})
    answers = run / "hf" / "step_00000004_answers.jsonl"
    answers.parent.mkdir()
    answers.with_name(f"{answers.name}.partial").write_text("{}\n{}\n")
    with pytest.raises(Replaced):  # a kill has left two of three answers
        command._answer_samples(words, {"RANK": "0", "HOME": "/root"})
    _, called, variables = execve.call_args.args
    assert called[-len(words) - 5 :] == ["generate", "--checkpoint", str(run), "--out", str(answers), *words]
    assert "RANK" not in variables and variables["HOME"] == "/root"
    answers.write_text("{}\n{}\n")  # the split has no more
    command._answer_samples(words, {})


def test_answers_name_what_they_need_before_a_start(tmp_path: Path) -> None:
    answers = ["--steps", "2", "--eval.answers", "3"]
    with pytest.raises(RunConfigError, match=r"eval.answers 3 needs checkpoint.dir: the last saved step"):
        validate_config(parse_config([*answers, "--data.path", "data"]), 1)
    with pytest.raises(RunConfigError, match=r"eval.answers 3 needs a data set, and data.path is synthetic"):
        validate_config(parse_config([*answers, "--data.path", "synthetic:text"]), 1)
    config = parse_config([*answers, "--model.hf", str(tmp_path)])
    with pytest.raises(RunConfigError, match=r"an export takes names .* holds none"):
        check_export_weights(config)
