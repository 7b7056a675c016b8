"""A rank that fails ends all ranks, with one message that says why.

Nobody ends the other ranks when one fails, as nobody would on other nodes. Over gloo, a rank that exits
closes its connections, and the others would report that; over NCCL they would wait.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from converters.convert import convert_adapter, convert_weights
from data_tools.convert import ConversionOptions
from data_tools.convert import convert_dataset as convert_data
from data_tools.sample_sizes import index_datasets
from megatron_vl.config import DataConfig, RunConfigError, parse_config
from megatron_vl.parallel import failures
from megatron_vl.parallel.process_grid import init_distributed
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import read_spec
from megatron_vl.train import run_rank
from megatron_vl.training.input_files import check_same_files
from megatron_vl.training.resolve import resolve_run
from megatron_vl.training.trainer import Trainer, TrainingStopped
from tests.converters.peft_models import peft_folder
from tests.security.payload import edit
from tests.support.ranks import Ended, run_apart, run_function
from tests.support.tiny_run import options_of, trained

PROGRAM = "megatron_vl.train: "
SECONDS = 20
"""Limit between the ends of the first and the last rank on a busy machine; a rank waits five until all have
read the message."""


COPIED = ("weights", "data", "peft", "lora")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> dict[str, Path]:
    """The second half of 48 samples in 4 shards does not fit into a row."""
    folder = tmp_path_factory.mktemp("failures")
    hf = tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32)
    question = {"from": "human", "value": "Hello?"}
    answers = [{"from": "gpt", "value": "word " * length} for length in [3] * 24 + [300] * 24]
    records = [{"conversations": [question, answer]} for answer in answers]
    for name, chosen, validation in (("half", records, 0.0), ("data", records[:24], 0.5)):
        (folder / f"{name}.json").write_text(json.dumps(chosen))
        options = ConversionOptions(
            out=folder / name, media_root=folder, workers=1, samples_per_shard=12, val_fraction=validation
        )
        convert_data([folder / f"{name}.json"], options)
    index_datasets(DataConfig(path=str(folder / "data")), read_spec(hf), hf)  # a run indexes the other one
    convert_weights(hf, folder / "weights", {"tp": 1, "pp": 4})
    peft_folder(folder / "peft", hf, target_modules=["q_proj"])
    convert_adapter(folder / "peft", hf, folder / "lora")
    return {"hf": hf, "folder": folder} | {name: folder / name for name in (*COPIED, "half")}


def one_message(ended: list[Ended]) -> str:
    """The message of all ranks, once each; all have failed, one soon after the other."""
    assert [rank.code for rank in ended] == [1] * len(ended), ended
    assert max(rank.at for rank in ended) - min(rank.at for rank in ended) < SECONDS
    messages = {line for rank in ended for line in rank.stderr.splitlines() if line.startswith(PROGRAM)}
    assert len(messages) == 1, messages
    assert all(rank.stderr.count(PROGRAM) == 1 for rank in ended), ended
    return messages.pop()


def watched(work: Callable[[], object], peer_timeout_s: float = 0) -> None:
    """Does the work of one of the ranks, which watch each other. A timeout of 0 is that of users."""
    failures._PEER_TIMEOUT_S = peer_timeout_s or failures._PEER_TIMEOUT_S

    def join_and_work() -> None:
        init_distributed(get_platform("cpu"))
        failures.watch_ranks()
        dist.barrier()
        work()

    sys.exit(run_rank(join_and_work))


def write_slowly(path: Path) -> threading.Thread:
    thread = threading.Thread(target=lambda: time.sleep(4) or path.write_text("whole"))
    thread.start()
    return thread


def fail_beside_waiting_ranks(folder: Path) -> None:
    """The last rank fails while the others wait in native code with the lock of their store's connection, as
    making a communicator does while a peer is missing; a thread of each still writes a file."""

    def work() -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(1)
            raise OSError("train-000007.tar: Input/output error")
        write_slowly(folder / f"written_{dist.get_rank()}")
        dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=600))

    watched(work)


@pytest.mark.ranks
def test_ranks_that_wait_elsewhere_are_ended(tmp_path) -> None:
    message = one_message(run_apart(fail_beside_waiting_ranks, [tmp_path], 3))
    assert message == "megatron_vl.train: rank 2: train-000007.tar: Input/output error"
    assert [(tmp_path / f"written_{rank}").read_text() for rank in range(2)] == ["whole", "whole"]


def fail_while_peer_writes(path: Path) -> None:
    """The second rank fails while the first writes a checkpoint, which takes longer than its peers wait."""

    def work() -> None:
        if dist.get_rank() == 1:
            time.sleep(0.5)
            raise OSError("train-7.tar: Input/output error")
        write_slowly(path).join()  # as the loop waits for it
        time.sleep(600)

    watched(work, 1.5)


@pytest.mark.ranks
def test_checkpoint_that_is_being_written_is_finished_before_any_rank_ends(tmp_path) -> None:
    """As soon as one rank is gone, the rest get SIGTERM."""
    done = run_function(fail_while_peer_writes, [tmp_path / "written"], 2)
    assert (tmp_path / "written").read_text() == "whole", done.stderr
    assert done.returncode == 1
    assert done.stderr.count("megatron_vl.train: rank 1: train-7.tar: Input/output error") == 1


def kill_host_of_store() -> None:
    """The first rank, in which the store lives, dies; the second waits for nothing that would tell it."""

    def work() -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()

    watched(work, 1)


@pytest.mark.ranks
def test_ranks_end_with_a_message_when_the_host_of_their_store_is_killed() -> None:
    done = run_function(kill_host_of_store, [], 2)
    messages = [line for line in done.stderr.splitlines() if line.startswith(PROGRAM)]
    assert len(messages) == 1, done.stderr
    assert "rank 0: the process" in messages[0] and "ended without a message" in messages[0]
    assert "the process that keeps the store of all ranks (127.0.0.1:" in messages[0]


def come_late(peer_timeout_s: float) -> None:
    """The second rank gets no time between the last barrier and the orderly end."""

    def work() -> None:
        if dist.get_rank() == 1:
            time.sleep(2)
        failures.stop_watching()

    watched(work, peer_timeout_s)


@pytest.mark.ranks
@pytest.mark.parametrize("peer_timeout_s", [0, 0.2])
def test_rank_may_come_late_to_the_orderly_end(peer_timeout_s: float) -> None:
    """The host of the store waits for it, or has ended before it: nothing is wrong either way."""
    done = run_function(come_late, [peer_timeout_s], 2)
    assert done.returncode == 0 and PROGRAM not in done.stderr, done.stderr


def test_error_stays_the_reported_one_when_the_log_cannot_be_closed(monkeypatch) -> None:
    """The others know of it before anything is closed, as that may take a while."""
    order: list[str] = []

    def close(has_failed: bool) -> None:
        order.append("closed")
        raise OSError("No space left on device")

    monkeypatch.setattr(failures, "report_failure", lambda error: order.append(f"reported {error}"))
    resolved_run = SimpleNamespace(config=None, spec=None, layout=None, last_step=1)

    def failing_trainer() -> Trainer:
        trainer = Trainer(resolved_run, None)
        trainer.hooks = [SimpleNamespace(end=lambda trainer, has_failed: order.append(f"hook: {has_failed}"))]
        trainer._on_close.callback(lambda: order.append("loader closed"))
        trainer._on_close.push(lambda kind, *_: close(has_failed=kind is not None))
        return trainer

    with pytest.raises(TrainingStopped, match="the reason"), failing_trainer():
        raise TrainingStopped("the reason")
    assert order == ["reported the reason", "hook: True", "closed", "loader closed"]

    with pytest.raises(OSError, match="No space left"):
        failing_trainer().close()


@pytest.mark.ranks
def test_samples_that_do_not_fit_end_all_replicas(prepared, tmp_path) -> None:
    half = ["--data.path", str(prepared["half"]), "--data.shuffle", "false"]
    ended = run_apart("megatron_vl.train", options_of(prepared, tmp_path / "run", *half), 2)
    assert f"the sizes of the samples of {prepared['half']} are not known" in ended[0].stdout
    message = one_message(ended)
    assert "96 of 104 samples could not be used" in message and "longer than seq_len" in message
    assert f"; {tmp_path / 'run' / 'quarantine.jsonl'} lists them" in message
    assert (tmp_path / "run" / "quarantine.jsonl").stat().st_size


@pytest.mark.ranks
def test_checkpoint_that_one_rank_cannot_write_ends_all(prepared, tmp_path) -> None:
    """Files of the second rank may not grow, as on a node with a full disk."""
    options = ["--checkpoint.interval", "2", "--data.num_workers", "0"]
    words = options_of(prepared, tmp_path / "run", *options, steps=2000)
    message = one_message(run_apart("megatron_vl.train", words, 2, file_bytes={1: 40 << 10}))
    assert "checkpoint of step 2 could not be written" in message
    assert "File too large" in message and message.rstrip().endswith("; there is no earlier checkpoint")
    assert not (tmp_path / "run" / "step_00000002").exists()


def nodes(prepared, folder: Path) -> dict[int, Path]:
    """Two working folders with the same files, as nodes with copies on their own disks."""
    folders = {rank: folder / f"node_{rank}" for rank in range(2)}
    for node in folders.values():
        for name in ("hf", *COPIED):
            shutil.copytree(prepared[name], node / name)
    return folders


NODE_PATHS = ["--model.hf", "hf", "--model.checkpoint", "weights", "--data.path", "data"]


def add_to_values(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, {"format": "pt"})


CHANGES: dict[str, tuple[Callable[[Path], Any], bool, str]] = {
    "hf/preprocessor_config.json": (lambda path: edit(path, image_mean=[0.5] * 3), True, ""),
    "hf/tokenizer.json": (lambda path: edit(path, normalizer=None), False, ""),
    "hf/chat_template.jinja": (lambda path: path.write_text("another template"), False, ""),
    "data/.nv-meta/split.yaml": (lambda path: path.write_text(path.read_text() + "\n"), False, ""),
    "data/.nv-meta/index.uuid": (Path.unlink, False, ""),
    "hf (weights)": (lambda path: add_to_values(path.parent / "hf"), True, "--model.checkpoint="),
    "peft/adapter_config.json": (lambda path: edit(path, lora_alpha=7), True, "--lora.adapter=peft"),
    "peft/adapter_model.safetensors": (Path.unlink, True, "--lora.adapter=peft"),
    "lora/manifest.json": (lambda path: edit(path, origin={}), True, "--lora.adapter=lora"),
    "run/step_00000001/run.json": (Path.unlink, True, "--checkpoint.dir=run"),
}
"""For each file, how the second node has another one, whether all ranks read it, and the option that gives
it."""


@pytest.mark.ranks
@pytest.mark.parametrize("name", CHANGES)
def test_run_rejects_other_files_under_the_same_path(prepared, tmp_path, monkeypatch, name) -> None:
    change, all_read, option = CHANGES[name]
    folders = nodes(prepared, tmp_path)
    if name.startswith("run/"):
        trained(prepared, folders[0] / "run", "--stop_after", "1", ranks=1)
        shutil.copytree(folders[0] / "run", folders[1] / "run")
    monkeypatch.chdir(folders[0])
    config = parse_config(options_of(prepared, tmp_path / "new", *NODE_PATHS, *option.split()))
    resolved_run = resolve_run(config, 1)
    monkeypatch.chdir(folders[1])
    for owns_loader in (False, True):
        check_same_files(resolved_run, owns_loader)

    change(folders[1] / name)
    message = rf"^{socket.gethostname()}: {re.escape(name)} is not as rank 0 reads it"
    for owns_loader in (True, False):
        is_refused = owns_loader or all_read
        with pytest.raises(RunConfigError, match=message) if is_refused else contextlib.nullcontext():
            check_same_files(resolved_run, owns_loader)


@pytest.mark.ranks
def test_node_with_stale_weights_ends_all(prepared, tmp_path) -> None:
    folders = nodes(prepared, tmp_path)
    shutil.rmtree(folders[1] / "weights")
    convert_weights(prepared["hf"], folders[1] / "weights", {"tp": 1, "pp": 2})
    words = options_of(prepared, tmp_path / "run", *NODE_PATHS, "--parallel.tp", "2", steps=3)
    message = one_message(run_apart("megatron_vl.train", words, 2, folders=folders))
    assert f"rank 1: {socket.gethostname()}: weights/manifest.json is not as rank 0 reads it." in message
    assert not list((tmp_path / "run").glob("step_*"))
