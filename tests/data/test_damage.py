"""Training uses, or counts and names, every sample of damaged data; nothing hangs or ends silently."""

import errno
import gc
import io
import json
import logging
import os
import random
import resource
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from PIL import Image

from megatron_vl.config import DataConfig
from megatron_vl.data import row_encoder
from megatron_vl.data.packing.fill_row import choose_row_samples
from megatron_vl.data.row_encoder import MAX_LOGGED_PER_REASON, RowEncoder, cook_sample
from megatron_vl.data.sample import deadline
from megatron_vl.data.sample.images import decode_image
from megatron_vl.data.sample.videos import probe_video
from megatron_vl.data.source import tolerant_reader
from megatron_vl.data.source.bad_samples import BadSampleMeter
from megatron_vl.data.source.dataset_description import LoaderError
from megatron_vl.data.source.energon_datasets import open_sample_reader
from megatron_vl.data.source.tolerant_reader import BROKEN_FIELD
from tests.support.ranks import in_ranks
from tests.tiny import tiny_checkpoint

from . import mixtures
from .datasets import converted, mixed_records, open_loader, turns
from .media import encoded, reader_without_memory, video, video_of, write

COUNT = 24


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine")
    out, report = converted(folder, mixed_records(folder / "media", COUNT), samples_per_shard=6)
    assert report.shards == 4
    loader(out).close()  # writes the sizes, before anything is damaged
    return out


@pytest.fixture
def dataset(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "data")


def keys(*left_out: int) -> set[str]:
    return {f"{i:09d}" for i in range(COUNT) if i not in left_out}


def loader(path: Path, **changes):
    folder = tiny_checkpoint("qwen2_5_vl")
    settings = {"seq_len": 320, "num_workers": 0, "shuffle": False}
    settings |= {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 24, **changes}
    return open_loader(DataConfig(path=str(path), **settings), folder)


def epoch(path: Path, **changes) -> tuple[Counter[str], dict[str, tuple[str, str]]]:
    """Keys that a little more than one pass gave, and (reason, shard) of each dropped key."""
    used: Counter[str] = Counter()
    dropped = {}
    with closing(loader(path, **changes)) as rows:
        for row in islice(rows, 30):
            used.update(row.sample_keys)
            assert sum(row.dropped_counts.values()) == len(row.dropped_samples)
            dropped |= {d.key: (d.reason, d.shard) for d in row.dropped_samples}
    return used, dropped


def index_of(shard: Path) -> Path:
    return shard.with_suffix(".tar.idx")


WHOLE_SHARD = {
    "missing, in a process": (Path.unlink, "shard missing", 2),
    "index missing": (lambda shard: index_of(shard).unlink(), "shard missing", 0),
    "index empty": (lambda shard: index_of(shard).write_bytes(b""), "shard damaged", 0),
    "noise": (lambda shard: shard.write_bytes(np.random.default_rng(0).bytes(9999)), "shard damaged", 0),
    "a folder": (lambda shard: (shard.unlink(), shard.mkdir()), "shard unreadable", 0),
}


@pytest.mark.parametrize("damage, reason, workers", WHOLE_SHARD.values(), ids=WHOLE_SHARD)
def test_missing_shard_costs_its_samples_alone(dataset, damage, reason, workers):
    damage(dataset / "train-000002.tar")
    used, dropped = epoch(dataset, num_workers=workers)
    missing = {f"train-000002.tar[{i}]" for i in range(6)}
    # The first sample of a shard is at its start whatever the index says.
    assert missing - {"train-000002.tar[0]"} <= set(dropped) <= missing
    assert set(dropped.values()) == {(reason, "train-000002.tar")}
    assert keys(*range(12, 18)) <= set(used)
    assert len(set(used)) + len(dropped) == COUNT


def test_truncated_shard_gives_the_samples_before_the_cut(dataset):
    shard = dataset / "train-000001.tar"
    data = shard.read_bytes()
    at = data.index(b"000000009.json")
    shard.write_bytes(data[: at + 700])
    used, dropped = epoch(dataset)
    assert dropped == {f"train-000001.tar[{i}]": ("shard damaged", "train-000001.tar") for i in (3, 4, 5)}
    assert set(used) == keys(9, 10, 11)


def test_checksum_notices_one_changed_byte(dataset):
    """Both would decode; the image stays in its row, grey and without loss."""
    shard = dataset / "train-000000.tar"
    data = bytearray(shard.read_bytes())
    data[data.index(b"What is this?")] ^= 1
    at = data.index(b"\x89PNG")
    at = data.index(b"IDAT", at) + 100
    data[at] ^= 1
    shard.write_bytes(data)
    used, dropped = epoch(dataset)
    assert dropped["000000000"] == ("text changed since conversion", "train-000000.tar")
    reasons = Counter(reason for reason, _ in dropped.values())
    assert reasons == {"text changed since conversion": 1, "image changed since conversion": 1}
    assert "000000000" not in used and all(key in used for key in dropped if key != "000000000")
    (damaged,) = dropped.keys() - {"000000000"}
    row = next(row for row in loader(dataset) if damaged in row.sample_keys)
    at = row.sample_keys.index(damaged)
    begin, end = row.cu_seqlens[at : at + 2].tolist()
    assert not row.loss_mask[begin:end].any() and row.loss_mask.any()


def test_dropped_sample_names_its_input_record(tmp_path):
    path, _ = converted(tmp_path, [{"conversations": turns(400 if i == 2 else 5)} for i in range(8)])
    dropped = next(loader(path)).dropped_samples[0]
    names = {"shard": "train-000000.tar", "source": "in.json record 3", "data_set": "", "key": "000000002"}
    why = {"reason": "longer than seq_len", "detail": dropped.detail, "size": dropped.size}
    assert vars(dropped) == names | why
    assert dropped.detail.startswith(f"{dropped.size} tokens") and dropped.size > 400
    assert "tokens do not fit into data.seq_len 320" in dropped.detail


def test_bad_sample_of_a_blend_is_logged_once_with_its_source(tmp_path, caplog):
    """Both sets have a sample of this key, and each comes again and again."""
    for name in ("birds", "ships"):
        path, _ = converted(tmp_path / name, [{"conversations": turns(n)} for n in (5, 400)])
        shutil.copytree(path, tmp_path / "sets" / name)
    with caplog.at_level(logging.WARNING):
        rows = list(islice(loader(mixtures.write(tmp_path / "sets")), 8))
    dropped = [f"sample {sample.key} of {sample.data_set}" for row in rows for sample in row.dropped_samples]
    named = ["sample 000000001 of birds", "sample 000000001 of ships"]
    assert sorted(set(dropped)) == named and len(dropped) > 2
    assert sorted(line.split(":")[0] for line in caplog.messages) == named


@pytest.mark.parametrize(("num_workers", "lines"), [(0, 10), (2, 5), (8, 1), (64, 1)])
def test_processes_share_the_ten_logged_samples(num_workers, lines, monkeypatch, caplog):
    worker = SimpleNamespace(id=1, num_workers=num_workers) if num_workers else None
    monkeypatch.setattr(row_encoder, "get_worker_info", lambda: worker)
    encoder: Any = RowEncoder.__new__(RowEncoder)
    encoder.logged_samples, encoder.source_names = {}, ()
    with caplog.at_level(logging.WARNING):
        for number in (*range(25), *range(25)):
            sample: Any = SimpleNamespace(shard_name="train.tar", key=str(number))
            encoder._log_bad_sample(sample, "too long", "9 tokens")
    assert len(caplog.messages) == lines <= MAX_LOGGED_PER_REASON
    process_text = " by loader process 1" if num_workers else ""
    assert caplog.messages[-1].endswith(f"(further ones are counted, not logged{process_text})")
    assert sum("further ones" in line for line in caplog.messages) == 1


# --- Storage that does not answer ---------------------------------------------------------------------------


def test_shard_that_does_not_answer_is_skipped_and_counted(dataset, monkeypatch):
    """A pipe to which nobody writes; the rest of the shard is refused while that read has not returned."""
    monkeypatch.setattr(tolerant_reader, "SAMPLE_TIMEOUT_S", 4.0)
    shard = dataset / "train-000001.tar"
    shard.unlink()
    os.mkfifo(shard)
    try:
        used, dropped = epoch(dataset)
    finally:  # whoever waits gets an empty file
        os.close(os.open(shard, os.O_RDWR))
    assert set(used) == keys(*range(6, 12))
    expected = ("reading takes too long", shard.name)
    assert dropped == {f"{shard.name}[{i}]": expected for i in range(6)}


def test_sample_that_takes_too_long_is_not_trained_on(pristine, monkeypatch):
    """Its text or its pixels; the record has a video alone."""
    context = loader(pristine)._planning_context
    encoder = context.row_encoder
    sample = cook_sample(open_sample_reader(context.datasets[0], None)[3])
    encoded_sample = encoder.preencode_sample(sample)
    monkeypatch.setattr(deadline, "SAMPLE_TIMEOUT_S", 1e-9)
    ready = encoder.postencode_sample(encoded_sample)
    assert encoder.dropped_counts == {"decoding takes too long": 1}
    assert encoder.dropped_samples[0].source.endswith(".json record 4"), encoder.dropped_samples
    assert not ready.loss_mask.any() and (ready.media_items[0].planes == 128).all()
    assert len(ready.token_ids) == len(encoded_sample.token_ids)
    refused = encoder.preencode_sample(sample).refused
    assert refused == ("encoding takes too long", "it took longer than 1e-09 s")


def test_bad_sample_share_stops_a_run():
    meter = BadSampleMeter(0.01)
    meter.add_counts(50, {"image does not decode": 10})
    assert not meter.stop_reason()
    meter.add_counts(0, {"shard missing": 1})
    reason = meter.stop_reason()
    assert "11 of 61 samples could not be used" in reason and "data.max_bad_share 0.01" in reason
    assert "10 image does not decode, 1 shard missing" in reason
    assert reason.endswith("Correct the data and convert them again; or raise data.max_bad_share")
    meter.add_counts(2000, {})
    assert not meter.stop_reason()
    meter.add_counts(0, {"longer than seq_len": 11})
    assert "Raise data.seq_len" in meter.stop_reason()
    other = BadSampleMeter(0.01)
    other.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    assert other.stop_reason() == meter.stop_reason()


def test_row_choice_is_the_fullest_of_all_subsets():
    draw = random.Random(0)
    for _ in range(200):
        sizes = np.array([(draw.randint(1, 40), draw.randint(0, 30)) for _ in range(draw.randint(1, 8))])
        patches = draw.choice([0, 40])
        row = choose_row_samples([(int(tokens), int(size)) for tokens, size in sizes], 64, patches)
        chosen = np.array([(1, *others) for others in product((0, 1), repeat=len(sizes) - 1)])
        totals = chosen @ sizes
        fits = totals[(totals <= (64, patches or np.inf)).all(1), 0]
        assert row == sorted(set(row)) and row[0] == 0
        tokens, used_patches = sizes[row].sum(0)
        assert tokens == fits.max() and (not patches or used_patches <= patches)


def test_limit_of_open_files_loses_no_sample(dataset, monkeypatch):
    """Its own files are closed first. If that is not enough, the run ends: the samples are not bad."""
    whole, _ = epoch(dataset)
    monkeypatch.setattr("megatron_vl.system.errors.RETRY_WAITS_S", (0.0, 0.0, 0.0))
    spare: list[Any] = []
    rows = loader(dataset)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        first = next(rows)
        # Other tests of this process have files open too.
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                spare.append(open("/dev/null"))
        used = Counter(first.sample_keys)
        for row in islice(rows, 29):  # what the loader itself has open is enough to go on
            assert not row.dropped_counts
            used.update(row.sample_keys)
        assert used == whole

        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(LoaderError, match="ulimit -n"):
            list(islice(rows, 30))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in spare:
            file.close()


def test_machine_fault_loses_no_sample(dataset, monkeypatch):
    """One that passes is not noticed. One that stays ends the run and names the shard."""
    whole, _ = epoch(dataset)
    failures_left, attempts, real_read = 1, 0, ShardInfosITarReader._get_item_by_sample_pointer

    def fails(*arguments: Any) -> Any:
        nonlocal failures_left, attempts
        attempts += 1
        if attempts % 5 == 0 and failures_left:
            failures_left, attempts = failures_left - 1, attempts - 1
            raise OSError(errno.EIO, "Input/output error")
        return real_read(*arguments)

    monkeypatch.setattr(ShardInfosITarReader, "_get_item_by_sample_pointer", fails)
    monkeypatch.setattr("megatron_vl.system.errors.RETRY_WAITS_S", (0.0, 0.0, 0.0))
    assert epoch(dataset) == (whole, {}) and not failures_left
    failures_left, attempts = 1 << 30, 0
    with pytest.raises(LoaderError, match=r"sample \d of train-\d+\.tar cannot be read: Input/output"):
        epoch(dataset, num_workers=1)


@pytest.mark.parametrize(("kind", "num_reads"), [("images", 0), ("videos", 3), ("frames", 8)])
def test_decoder_without_memory_is_not_damage(tmp_path, monkeypatch, kind, num_reads):
    media = {"images": ["a.png"], "videos": ["a.mp4"], "frames": [["a.png", "a.png"]]}[kind]
    write(tmp_path / "media/a.png", encoded(56, 56))
    write(tmp_path / "media/a.mp4", video(12, 56, 84))
    asked = [{"from": "human", "value": "<image>" if kind == "images" else "<video>"}, turns(1)[1]]
    out, _ = converted(tmp_path, [{kind.replace("frames", "videos"): media, "conversations": asked}])
    rows = loader(out)
    monkeypatch.setattr("io.BytesIO", reader_without_memory(num_reads))
    with pytest.raises(MemoryError, match="no room for pixels"):
        next(rows)


@contextmanager
def memory_limit(spare_bytes: int) -> Iterator[None]:
    """Refuses this process more address space, of which earlier tests would leave parts free."""
    gc.collect()  # else a collection would make room
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + spare_bytes, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@in_ranks()
def test_reader_without_memory_is_not_damage(tmp_path):
    write(tmp_path / "media/a.jpg", encoded(56, 56, "jpeg") + bytes(64 << 20))
    asked = [{"from": "human", "value": "<image>"}, turns(1)[1]]
    out, _ = converted(tmp_path, [{"image": "a.jpg", "conversations": asked}])
    rows = loader(out)
    with memory_limit(32 << 20), pytest.raises(MemoryError):
        next(rows)


@pytest.mark.parametrize("decode", [decode_image, probe_video])
@in_ranks()
def test_large_medium_without_memory_is_not_damage(decode):
    """Pillow and FFmpeg say of most formats that the data are broken."""
    black = np.zeros((6144, 6144, 3), np.uint8)
    if decode is probe_video:
        data = video_of([black])
    else:
        Image.fromarray(black).save(file := io.BytesIO(), "WEBP", lossless=True)
        data = file.getvalue()
    decode(data)
    with memory_limit(16 << 20), pytest.raises(MemoryError):
        decode(data)


def test_reader_keeps_memory_flat(dataset):
    reader = open_sample_reader(loader(dataset)._planning_context.datasets[0], None)
    traced = []
    tracemalloc.start()
    try:
        for _ in range(3):
            for number in range(300):
                assert BROKEN_FIELD not in reader[number % COUNT]
            traced.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert traced[2] - traced[1] < 50_000
