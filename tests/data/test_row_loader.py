"""Loaders whose batches are planned from the sizes that `megatron-vl data index` writes."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from tokenizers import Tokenizer

from data_tools import sample_sizes
from data_tools.sample_sizes import index_datasets, measure_sample
from megatron_vl.config import DataConfig
from megatron_vl.data import planned_rows
from megatron_vl.data.loader import RowLoader, build_loader
from megatron_vl.data.packing.batch_planner import BatchPlanner, PlannedBatch
from megatron_vl.data.planned_rows import PlannedRankRows
from megatron_vl.data.row_encoder import RowEncoder, cook_sample
from megatron_vl.data.source import sample_order
from megatron_vl.data.source.dataset_description import METADATA_DIR, SIZES_DIR, read_description
from megatron_vl.data.source.energon_datasets import open_sample_reader
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.sample_sizes import find_datasets_without_sizes, open_stored_sizes
from megatron_vl.data.state_json import LoaderStateError
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.families.hf_folder import compute_tokenizer_digest
from megatron_vl.spec.positions import GridTHW
from megatron_vl.training.rows.row_message import serialize_row
from tests.security.payload import edit
from tests.test_processes import wait_until
from tests.tiny import tiny_checkpoint
from toolkit.cli import main

from .datasets import converted, mixed_records

COUNT = 60
SETTINGS: dict[str, Any] = {"seq_len": 256, "max_bad_share": 1.0}


def hf(family: str = "qwen2_5_vl") -> Path:
    return tiny_checkpoint(family)


def data_config(path: Path, **changes: Any) -> DataConfig:
    return DataConfig(path=str(path), **({"num_workers": 0} | SETTINGS | changes))


@pytest.fixture(autouse=True)
def nothing_is_decoded(monkeypatch) -> None:
    """Only keys and counts are compared here."""

    def black(encoder: RowEncoder, _: Any, __: Any, grid: GridTHW) -> torch.Tensor:
        return torch.zeros(1, grid.h * grid.w, 3 * encoder.pixel_settings.patch_size**2, dtype=torch.uint8)

    monkeypatch.setattr(RowEncoder, "_decode_planes", black)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    records = mixed_records(folder / "media", COUNT)
    frames = ["images/0.img", "images/35.img"] * 2
    records[3]["video"] = [frames]  # taken whole
    records[1]["conversations"][0]["value"] = "long " * 400  # cannot be used, which is counted once an epoch
    path, _ = converted(folder, records, samples_per_shard=7, val_fraction=0.1)
    (found,) = index_datasets(data_config(path), read_spec(hf()), hf(), num_workers=2)
    assert (found.samples, found.unusable) == (COUNT, 0)
    return path


@pytest.fixture
def folder(dataset, tmp_path) -> Path:
    return shutil.copytree(dataset, tmp_path / "set")


def stored_sizes(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (path / METADATA_DIR / SIZES_DIR).glob("*/*")}


Step = tuple[list[list[str]], dict[str, int]]
"""The keys of a step's rows, in order, and what was dropped."""


class Run:
    """All data-parallel ranks of a run, one after the other in this process."""

    def __init__(self, path: Path, ranks: int, workers: int = 0, rows: int = 12, **changes: Any) -> None:
        self.share = rows // ranks
        data = data_config(path, num_workers=workers, **changes)
        spec = read_spec(hf())
        build = partial(build_loader, data, spec, hf(), dp=ranks, rows_per_step=rows)
        self.loaders = [build(dp_rank=rank) for rank in range(ranks)]

    def after(self, state: dict[str, Any]) -> Run:
        for loader in self.loaders:
            loader.load_state_dict(state)
        return self

    def steps(self, count: int) -> list[Step]:
        found = []
        for _ in range(count):
            rows = [next(loader) for loader in self.loaders for _ in range(self.share)]
            dropped = sum((Counter(row.dropped_counts) for row in rows), Counter())
            found.append(([row.sample_keys for row in rows], dict(dropped)))
        return found

    def stop(self) -> dict[str, Any]:
        """The state, as a checkpoint holds it; then the processes end."""
        state = json.loads(json.dumps(self.loaders[0].state_dict()))
        for loader in self.loaders:
            loader.close()
        return state


def moved(path: Path, places: list[tuple[int, int, int]], **changes: Any) -> Iterator[Step]:
    """A run that moves: for each place the number of ranks, workers and steps."""
    state: dict[str, Any] = {}
    for ranks, workers, steps in places:
        run = Run(path, ranks, workers, **changes)
        if state:
            run.after(state)
        yield from run.steps(steps)
        state = run.stop()


def planner_pid(loader: RowLoader) -> int:
    (planner,) = loader._rank_rows._planned_steps._workers
    return planner.pid


def flat(rows: list[list[str]]) -> list[str]:
    return sorted(key for keys in rows for key in keys)


def test_resume_on_other_ranks_and_workers_takes_the_same_samples(dataset, monkeypatch):
    whole = list(moved(dataset, [(4, 0, 7)]))
    places = [(4, 0, 2), (2, 1, 1), (3, 0, 1), (1, 3, 1), (4, 0, 2)]
    got = list(moved(dataset, places))
    assert [flat(rows) for rows, _ in got] == [flat(rows) for rows, _ in whole]
    assert [dropped for _, dropped in got] == [dropped for _, dropped in whole]
    count = read_description(dataset).split_facts("train").dataset_identity["samples"]
    passes = sum(len(flat(rows)) + sum(dropped.values()) for rows, dropped in whole) / count
    loader = Run(dataset, 1).loaders[0]
    assert loader.count_passes(7) == passes
    assert loader.count_passes(10_000) == pytest.approx(passes / 7 * 10_000, rel=0.05)
    seen = Counter(key for rows, _ in whole for keys in rows for key in keys)
    assert len(seen) == count - 1
    # Samples of several passes wait at once. test_blend.py tests that each is drawn once a pass.
    assert max(seen.values()) - min(seen.values()) <= 3
    assert sum((Counter(dropped) for _, dropped in whole), Counter())["longer than seq_len"] >= 2

    monkeypatch.setattr(sample_order, "LANES", 4)  # 60 samples fill no more lanes with blocks of 3
    monkeypatch.setattr(planned_rows, "SHUFFLE_BLOCK", 3)
    by_blocks = [list(moved(dataset, each)) for each in ([(4, 0, 7)], places)]
    assert by_blocks[0] != whole
    assert [flat(rows) for rows, _ in by_blocks[0]] == [flat(rows) for rows, _ in by_blocks[1]]


def test_loader_closes_at_once_while_its_planner_works(dataset, monkeypatch):
    """And while its processes read, for each of which torch waits five seconds. No process is left."""
    plan, calls = BatchPlanner.next_batch, iter(range(100))
    planning, reading = multiprocessing.Value("i", 0), multiprocessing.Value("i", 0)

    def stalls(planner: BatchPlanner) -> PlannedBatch:
        if next(calls) > 1:  # it plans ahead
            planning.value = 1
            time.sleep(60)
        return plan(planner)

    def never_ends(*_: Any) -> None:
        with reading:
            reading.value += 1
        time.sleep(60)

    monkeypatch.setattr(BatchPlanner, "next_batch", stalls)
    monkeypatch.setattr(planned_rows, "read_planned_row", never_ends)
    rows = PlannedRankRows(Run(dataset, 1, workers=3).loaders[0]._planning_context, 0, 1, 3, 0)
    wait_until(lambda: reading.value == 3 and planning.value)
    pids = [process.pid for each in (rows._rows, rows._planned_steps) for process in each._workers]
    began = time.monotonic()
    rows.close()
    assert time.monotonic() - began < 4 and not any(map(psutil.pid_exists, pids))


def test_planner_process_shares_the_memory_of_its_rank(dataset):
    """A garbage collection that looked at inherited objects would copy their pages."""
    inherited: list[list[None]] = [[] for _ in range(1_000_000)]
    with closing(Run(dataset, 1, workers=1).loaders[0]) as loader:
        next(loader)
        planner = psutil.Process(planner_pid(loader))
        assert planner.memory_full_info().uss < 40 * len(inherited)  # an empty list takes 72 bytes


@pytest.mark.parametrize("process", ["planner", "worker"])
def test_killed_worker_ends_the_run_and_is_named(dataset, process):
    with closing(Run(dataset, 1, workers=2).loaders[0]) as loader:
        next(loader)
        pid = planner_pid(loader) if process == "planner" else loader._rank_rows._rows._workers[1].pid
        with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid.* {pid}\)"):
            os.kill(pid, signal.SIGKILL)
            for _ in range(100):
                next(loader)


def test_row_that_cannot_be_shared_ends_the_run(dataset, monkeypatch):
    """A thread of torch would drop the row, and the rank would wait for it without end."""

    def fails(*_: Any) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", fails)
    with closing(Run(dataset, 1, workers=1).loaders[0]) as loader:
        with pytest.raises(LoaderError, match=r"shm\) for file\): enlarge /dev/shm .*--shm-size"):
            next(loader)


def test_row_is_shorter_where_sizes_are_wrong(dataset, folder):
    """A shard is gone, and the index lies about a sample: ranks still have as many rows, of other samples."""
    [path] = (folder / METADATA_DIR / SIZES_DIR).glob("*/samples.npy")
    sizes = np.load(path)
    sizes["tokens"][5] += 1
    np.save(path, sizes)
    (folder / "train-000002.tar").unlink()

    whole = Run(dataset, 2).steps(5)
    now = Run(folder, 2, max_bad_share=1.0).steps(5)
    reasons = sum((Counter(dropped) for _, dropped in now), Counter())
    assert reasons["size differs from the index"] >= 1 and reasons["shard missing"] >= 7
    for (rows, _), (before, _) in zip(now, whole, strict=True):
        assert len(rows) == len(before)
    kept = flat([keys for rows, _ in now for keys in rows])
    assert set(kept) < set(flat([keys for rows, _ in whole for keys in rows]))


def test_row_without_usable_samples_is_padding(dataset):
    loader = Run(dataset, 1).loaders[0]
    row = loader._planning_context.row_encoder.make_row([])
    assert (row.seq_len, row.num_samples, row.num_patches, row.sample_keys) == (256, 1, 0, [])
    assert not row.loss_mask.any()
    assert serialize_row(row)[0]["counts"]["samples"] == 0


def test_resume_with_more_rows_a_step_keeps_the_order(dataset):
    """Unpacked and in the data set's order, so that the samples of a step are those after the last one's."""
    settings: dict[str, Any] = {"pack": False, "shuffle": False, "seq_len": 4096}
    whole = [keys for keys, _ in moved(dataset, [(1, 0, 12)], rows=4, **settings)]
    first = Run(dataset, 1, rows=4, **settings)
    got = [keys for keys, _ in first.steps(3)]
    second = Run(dataset, 2, rows=6, **settings).after(first.stop())
    wider = [keys for keys, _ in second.steps(2)]
    assert got == whole[:3] and flat(sum(wider, [])) == flat(sum(whole[3:6], []))
    third = Run(dataset, 3, rows=3, **settings).after(second.stop())
    assert flat(sum([keys for keys, _ in third.steps(4)], [])) == flat(sum(whole[6:9], []))


def test_resume_rejects_states_of_other_settings(dataset):
    first = Run(dataset, 2)
    first.steps(1)
    state = first.stop()
    for identity, settings, message in (
        ({}, {"seq_len": 300}, "seq_len"),
        ({"version": 2}, {}, "version 2 of its format, .* reads 1; resume with the program"),
        ({}, {"shuffle": False}, "set data.shuffle back"),
    ):
        with pytest.raises(LoaderStateError, match=message):
            Run(dataset, 2, **settings).after(state | {"identity": state["identity"] | identity})
    half = Run(dataset, 2)
    next(half.loaders[0])
    with pytest.raises(LoaderStateError, match="only between steps"):
        half.loaders[0].state_dict()
    with pytest.raises(LoaderStateError, match="before the first row"):
        half.after(state)


def permute_tokens(folder: Path) -> None:
    """Another tokenizer of the same size: 256 tokens have each other's ids, and the words are the same."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    ids = sorted(model["vocab"].values())[:256]
    new_ids = dict(zip(ids, reversed(ids), strict=True))
    vocabulary = {token: new_ids.get(number, number) for token, number in model["vocab"].items()}
    edit(folder / "tokenizer.json", model=model | {"vocab": vocabulary})


def processor(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "preprocessor_config.json", **fields)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (permute_tokens, "saved with tokenizer = '.* give the tokenizer that"),
        (processor(image_mean=[0.5] * 3), "saved with processor.norm = .* give the files of the"),
        (processor(min_frames=6), "saved with processor.video_min_frames = 4, this loader has 6"),
        (processor(patch_size=16), r"\(16, 2, 2\) in the image processor, \(14, 2, 2\) in config"),
    ],
)
def test_resume_rejects_another_tokenizer_or_processor(dataset, tmp_path, change, named):
    state = Run(dataset, 1).stop()
    shutil.copytree(hf(), other := tmp_path / "hf")
    change(other)
    shutil.copytree(dataset, folder := tmp_path / "set")
    index_datasets(data_config(folder), read_spec(other), other)
    with pytest.raises((LoaderError, LoaderStateError), match=named):
        loader = build_loader(data_config(folder), read_spec(other), other, rows_per_step=12)
        loader.load_state_dict(state)


def test_tokenizer_digest_ignores_how_files_are_written(tmp_path):
    shutil.copytree(hf(), other := tmp_path / "hf")
    fields = json.loads((other / "tokenizer.json").read_text())
    model = fields["model"]
    model["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    model["vocab"] = dict(reversed(model["vocab"].items()))
    (other / "tokenizer.json").write_text(json.dumps(fields, indent=2))

    def digest(folder: Path = other) -> str:
        return compute_tokenizer_digest(Tokenizer.from_file(str(folder / "tokenizer.json")))

    assert digest() == digest(hf())
    changes = {"normalizer": None, "pre_tokenizer": None, "added_tokens": fields["added_tokens"][:-1]}
    for name, value in (*changes.items(), ("model", model | {"merges": model["merges"][:-1]})):
        assert fields[name] != value
        (other / "tokenizer.json").write_text(json.dumps(fields | {name: value}))
        assert digest() != digest(hf()), name
    (other / "tokenizer.json").write_text(json.dumps(fields))
    permute_tokens(other)
    assert digest() != digest(hf())


def test_resume_finds_damage_when_the_state_is_loaded(dataset):
    first = Run(dataset, 1)
    first.steps(1)
    state = first.stop()
    kept = [pair for pair in state["planner"]["dict"] if pair[0] != "waiting"]
    for damaged in (state | {"planner": {"dict": kept}}, {k: state[k] for k in state if k != "rows"}):
        with pytest.raises(LoaderStateError, match="damaged.*go back to an earlier checkpoint"):
            Run(dataset, 1, 1).loaders[0].load_state_dict(damaged)


def lacking(path: Path, split: str = "train", family: str = "qwen2_5_vl") -> list[Path]:
    found = find_datasets_without_sizes(read_description(path), hf(family), data_config(path), split)
    return [Path(str(one.path)) for one in found]


def test_missing_sizes_are_found(dataset, tmp_path):
    assert lacking(dataset) == []
    # Another family has another chat template or other placeholders, and another rule other text.
    assert lacking(dataset, family="qwen3_5") == [dataset]
    with pytest.raises(LoaderError, match="cannot be read .*; write it with `megatron-vl data index`"):
        build_loader(data_config(dataset), read_spec(hf("qwen3_5")), hf("qwen3_5"))

    # Only what a split reads matters, each set once.
    bare, mixture = tmp_path / "bare", tmp_path / "mixture.yaml"
    shutil.copytree(dataset, bare)
    shutil.rmtree(bare / METADATA_DIR / SIZES_DIR)
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
    train = f"{head}    blend:\n      - {{path: {dataset}, weight: 2}}\n"
    mixture.write_text(f"{train}  val:\n    blend:\n      - {{path: {bare}}}\n      - {{path: {bare}}}\n")
    assert lacking(mixture) == [] and lacking(mixture, "val") == [bare]


def test_damaged_sizes_are_refused(dataset, tmp_path):
    shutil.copytree(dataset / METADATA_DIR / SIZES_DIR, tmp_path / SIZES_DIR)
    [sizes_dir] = (tmp_path / SIZES_DIR).iterdir()
    for name in ("samples.npy", "media.npy", "shards.json"):
        path = sizes_dir / name
        whole = path.read_bytes()
        for held in (b"", b"PK\x03\x04", b"{}"):
            path.write_bytes(held)
            with pytest.raises(LoaderError, match="cannot be read"):
                open_stored_sizes(tmp_path, sizes_dir.name)
        path.write_bytes(whole)


def test_sizes_of_other_content_are_refused(folder):
    """As on a node whose copy of the data set has other sizes than the one that rank 0 looked at."""
    facts = read_description(folder).split_facts("train")
    [path] = (folder / METADATA_DIR / SIZES_DIR).glob("*/shards.json")
    edit(path, content="another")
    with pytest.raises(
        LoaderError, match=f"{path.parent.name} is of the content 'another', and the run reads '"
    ):
        build_loader(data_config(folder), read_spec(hf()), hf(), split_facts=facts)


def test_index_ends_at_faults_of_the_storage(dataset, folder, tmp_path, monkeypatch, capsys):
    """The sizes are those of a run without a fault once the shard is back; until then the command ends."""
    shutil.rmtree(folder / METADATA_DIR / SIZES_DIR)
    away = (folder / "train-000002.tar").rename(tmp_path / "away.tar")
    words = ["data", "index", "--data.path", str(folder), "--model.hf", str(hf()), "--workers"]
    for workers in ("1", "2"):
        assert main([*words, workers]) == 1
        message = capsys.readouterr().err
        assert "shard missing: sample 0 of train-000002.tar" in message and "data index` again" in message

    def too_many(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files", "shard")

    with monkeypatch.context() as patched:
        patched.setattr(ShardInfosITarReader, "__getitem__", too_many)
        assert main([*words, "1"]) == 1
    message = capsys.readouterr().err
    assert "raise the limit of open files" in message and "Traceback" not in message

    away.rename(folder / "train-000002.tar")
    assert main([*words, "1"]) == 0 and stored_sizes(folder) == stored_sizes(dataset)


def test_interrupted_index_leaves_no_sizes(dataset, folder, monkeypatch):
    wanted = stored_sizes(dataset)
    spec, data = read_spec(hf()), data_config(folder)
    assert index_datasets(data, spec, hf())[0].seconds == 0.0, "those that are there are kept"

    sizes_dir = folder / METADATA_DIR / SIZES_DIR
    (name,) = [path.name for path in sizes_dir.iterdir()]
    shutil.rmtree(sizes_dir)
    measure, numbers = sample_sizes.measure_samples, itertools.count()

    def stops(*arguments: Any) -> Any:
        if next(numbers) == 4:
            raise KeyboardInterrupt
        return measure(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(sample_sizes, "measure_samples", stops)
        with pytest.raises(KeyboardInterrupt):
            index_datasets(data, spec, hf())
    assert [path.name for path in sizes_dir.iterdir()] in ([], [f".{name}.lock"])
    (sizes_dir / f"{name}-killed.partial").mkdir()
    index_datasets(data, spec, hf())
    assert [path.name for path in sizes_dir.iterdir()] == [name]
    assert stored_sizes(folder) == wanted


def test_index_by_two_processes_keeps_each_others_results(folder, monkeypatch):
    """The first one is held where it removes what it takes for an earlier content."""
    context = multiprocessing.get_context("fork")
    (sizes_dir,) = (folder / METADATA_DIR / SIZES_DIR).iterdir()
    wanted = stored_sizes(folder)
    (sizes_dir / "shards.json").write_text('{"content": "earlier"}')
    first_waits, second_ended = context.Event(), context.Event()
    remove = shutil.rmtree

    def remove_late(path: Path, **options: Any) -> None:
        if path == sizes_dir and multiprocessing.current_process().name == "first":
            first_waits.set()
            second_ended.wait(3)
        remove(path, **options)

    def begin() -> None:
        if multiprocessing.current_process().name == "second":
            first_waits.wait(60)
        index_datasets(data_config(folder), read_spec(hf()), hf())
        second_ended.set()

    monkeypatch.setattr(sample_sizes.shutil, "rmtree", remove_late)
    processes = [context.Process(target=begin, name=name) for name in ("first", "second")]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [path.name for path in sizes_dir.parent.iterdir()] == [sizes_dir.name]
    assert stored_sizes(folder) == wanted


def test_index_stores_no_fault_of_the_machine(dataset, monkeypatch):
    context = Run(dataset, 1).loaders[0]._planning_context
    sample = cook_sample(open_sample_reader(context.datasets[0], None)[0])

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(context.row_encoder.chat_encoder.tokenizer, "apply_chat_template", fails)
    with pytest.raises(LoaderError, match=f"sample {sample.key}: MemoryError"):
        measure_sample(context.row_encoder, sample)


def exclude(folder: Path, *names: str) -> None:
    path = folder / METADATA_DIR / "split.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"exclude": list(names)}))
    assert read_description(folder).excluded_names == list(names)


def sizes_by_shard(folder: Path) -> dict[str, bytes]:
    [sizes_dir] = (folder / METADATA_DIR / SIZES_DIR).iterdir()
    sizes = open_stored_sizes(folder / METADATA_DIR, sizes_dir.name)
    ranges = sizes.shard_ranges.items()
    return {name: sizes.sample_records["tokens"][begin : begin + n].tobytes() for name, (begin, n) in ranges}


def test_index_measures_shards_that_are_no_longer_excluded(dataset, folder, capsys):
    """Sizes without it are those of other shards, although the content is the same."""
    exclude(folder, "train-000001.tar")
    assert lacking(folder) == [], "sizes of more shards than there are still hold"
    shutil.rmtree(folder / METADATA_DIR / SIZES_DIR)
    words = ["data", "index", "--model.hf", str(hf()), "--workers", "1", "--data.path", str(folder)]
    assert main(words) == 0
    some, all_sizes = sizes_by_shard(folder), sizes_by_shard(dataset)
    middle = all_sizes.pop("train-000001.tar")
    assert some == all_sizes and middle not in some.values()
    exclude(folder)
    assert lacking(folder) == [folder]
    capsys.readouterr()
    assert main(words) == 0 and f"sizes of {COUNT} samples and " in capsys.readouterr().out
    assert stored_sizes(folder) == stored_sizes(dataset)
    assert main(words) == 0 and "were there" in capsys.readouterr().out
    (folder / METADATA_DIR / "index.uuid").write_text("another content")
    assert lacking(folder) == [folder]
    assert main(["data", "show", *words[2:4], *words[6:]]) == 0 and lacking(folder) == []
