"""``megatron-vl train``: how it reads the environment, what ``--dry-run`` prints, and a real start
of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.small_run import environment, metrics, options_of, prepare, train
from toolkit.cli import main
from toolkit.train import command
from toolkit.train.launch_environment import LaunchEnvironment, first_host, read_launch_environment

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tests" / "hf_configs"
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_PROCID": "9",
}


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-006,010]", "gpu003"),
        ("gpu[3,7]-ib,login", "gpu3-ib"),
        ("rack1-n[12]", "rack1-n12"),
    ],
)
def test_first_host_of_a_slurm_list(nodelist, host):
    assert first_host(nodelist) == host


def test_a_shell_and_a_batch_script_start_the_ranks_themselves():
    assert read_launch_environment({}) == LaunchEnvironment()
    assert (
        read_launch_environment({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"})
        == LaunchEnvironment()
    )  # sbatch without srun


def test_a_rank_of_torchrun_and_one_of_slurm():
    assert read_launch_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}).is_rank
    tasks = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1"}
    slurm = read_launch_environment(STEP | tasks)
    assert slurm.is_rank
    assert slurm.rank_variables == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "23456",
    }
    assert (
        read_launch_environment(
            STEP | tasks | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}
        ).rank_variables["MASTER_ADDR"]
        == "10.0.0.1"
    )


def test_a_slurm_step_with_a_task_a_node_starts_the_ranks_of_its_node():
    found = read_launch_environment(STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"})
    assert found == LaunchEnvironment(nnodes=2, master_addr="gpu007", master_port=23456, job_id="123456")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    """A model and a data set, as far as can be seen before a start: which files exist."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "data" / ".nv-meta").mkdir(parents=True)
    (folder / "config.json").write_bytes((CONFIGS / "Qwen2.5-VL-7B-Instruct.json").read_bytes())
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


def test_ranks_of_one_node(started, inputs):
    assert main(["train", "--nproc-per-node", "4", *inputs, "--parallel.tp", "2", "--steps", "3"]) == 7
    group = ["--nnodes", "1", "--nproc-per-node", "4", "--standalone"]
    assert started == [[*group, "-m", "megatron_vl.train", *inputs, "--parallel.tp", "2", "--steps", "3"]]


def test_missing_inputs_are_refused_before_anything_starts(started, inputs, capsys, tmp_path):
    ranks = ["train", "--nproc-per-node", "2", *inputs]
    assert main([*ranks, "--data.path", str(tmp_path / "none")]) == 1
    err = capsys.readouterr().err
    assert "none does not exist; give a folder written by `megatron-vl data convert`" in err
    assert main([*ranks, "--model.hf", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert f"model.hf {tmp_path} holds no config.json" in err and "rank" not in err
    assert started == []


def test_ranks_of_several_nodes(started, inputs, capsys):
    nodes = ["train", "--nproc-per-node", "8", "--nnodes", "2", *inputs, "--global_batch_size", "16"]
    assert main(nodes) == 2 and "give --master-addr" in capsys.readouterr().err
    assert main([*nodes, "--master-addr", "head", "--job-id", "mine"]) == 7
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "head:29500", "--rdzv-id", "mine"]
    assert started[0][4:10] == meeting


def test_ranks_of_slurm_start_no_ranks_of_their_own(started, capsys, monkeypatch):
    for name, value in (STEP | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2"}).items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--nproc-per-node", "8", "--steps", "3"]) == 2
    assert "leave out --nproc-per-node" in capsys.readouterr().err and started == []


def test_a_layout_that_does_not_fit_is_refused_before_anything_starts(started, capsys):
    assert main(["train", "--nproc-per-node", "4", "--parallel.tp", "3"]) == 1
    assert "do not divide the world size 4" in capsys.readouterr().err
    assert main(["train", "--nproc-per-node", "4", "--stepz", "3"]) == 2
    assert "field 'stepz' is unknown; did you mean steps" in capsys.readouterr().err
    assert started == []


def dry_run(capsys, *words: str) -> dict:
    assert main(["train", "--dry-run", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


LARGE = ["--model.hf", str(CONFIGS / "Qwen2.5-VL-72B-Instruct.json"), "--data.seq_len", "8192"]
LARGE += ["--global_batch_size", "64", "--parallel.tp", "8", "--parallel.pp", "4"]
LARGE += ["--parallel.sequence_parallel", "true", "--parallel.layers", "[17,21,21,21]"]


def test_dry_run_says_layout_schedule_and_memory(capsys):
    """Counted by hand: 64 ranks are two replicas of 32 micro-batches; stage 0 runs three
    forward passes ahead."""
    facts = dry_run(capsys, *LARGE, "--nnodes", "8", "--nproc-per-node", "8")
    assert facts["ranks"] == 64 and facts["layout"]["dp"] == 2
    assert facts["stages"][0] == ["vision tower", "embedding", "decoder layers 0 to 16"]
    assert facts["stages"][3] == ["decoder layers 59 to 79", "output layer and loss"]
    assert facts["schedule"] == {
        "kind": "1F1B",
        "micro_batches": 32,
        "warm_up": [3, 2, 1, 0],
        "steady": [29, 30, 31, 32],
        "idle_share": round(3 / 35, 4),
    }
    assert facts["tokens_per_step"] == 64 * 8192
    # The second stage has decoder layers only: q, k, v and output of attention, MLP, over 8 ranks.
    layer = (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 29568) / 8
    assert facts["memory_gib"][1]["weights"] == pytest.approx(2 * 21 * layer / 2**30, rel=1e-3)


def test_dry_run_says_what_is_in_host_memory_and_what_would_have_to_be(capsys):
    facts = dry_run(
        capsys, *LARGE, "--nnodes", "8", "--nproc-per-node", "8", "--optimizer.offload_fraction", "1"
    )
    assert facts["offload_fraction"] == 1.0 and facts["host_gib_per_rank"] > 0
    assert all(stage["optimizer"] == 0 for stage in facts["memory_gib"])
    assert facts["least_offload_fraction"].keys() >= set(facts["fits"])


def test_dry_run_without_gpus_takes_as_few_ranks_as_the_layout_needs(capsys, monkeypatch):
    monkeypatch.setattr("toolkit.train.dry_run.query_gpus", list)
    assert dry_run(capsys, *LARGE)["ranks"] == 32
    monkeypatch.setenv("RANK", "0")  # a dry run is never a rank
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert dry_run(capsys, *LARGE)["ranks"] == 32


def test_dry_run_of_a_run_on_cpu_says_nothing_of_gpus(capsys):
    words = [*LARGE, "--parallel.layers", "auto", "--platform", "cpu", "--nproc-per-node", "32"]
    facts = dry_run(capsys, *words)
    assert facts["layout"]["layers"] == [20, 20, 20, 20] and facts["split"] == "even"
    assert (facts["fits"], facts["least_offload_fraction"], facts["speed"]) == ([], {}, None)
    assert main(["train", "--dry-run", *words]) == 0
    said = capsys.readouterr().out
    assert "fullest rank: " in said and "H200" not in said and "split [20, 20, 20, 20]: even" in said


def test_dry_run_is_readable_and_imports_no_torch():
    line = ["train", "--dry-run", *LARGE]
    code = f"import sys; from toolkit.cli import main; assert main({line!r}) == 0; "
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "stage 0: 3 forward, " in done.stdout and "fullest GPU: " in done.stdout


@pytest.mark.ranks
def test_one_command_trains_on_two_ranks(tiny_checkpoint, tmp_path):
    """It starts as a user starts it; a single rank reads the same rows and so has the same losses."""
    prepared = prepare(tmp_path, tiny_checkpoint("qwen2_5_vl"), samples=8)
    fields = options_of(prepared, tmp_path / "run2", "--parallel.tp", "2", steps=3)
    start = [sys.executable, "-m", "toolkit", "train", "--nproc-per-node", "2", *fields]
    done = subprocess.run(start, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]

    assert train(prepared, tmp_path / "run1", ranks=1, steps=3).returncode == 0
    two, one = ([step["loss"] for step in metrics(tmp_path / run)] for run in ("run2", "run1"))
    assert len(one) == 3 and two == pytest.approx(one, rel=1e-5)
