"""A data set in an object store (moto's S3, read by Energon's client) gives the rows of the same folder."""

import json
import logging
import os
import shutil
import signal
import threading
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path

import boto3
import multistorageclient.shortcuts
import pytest
import yaml
from megatron.energon.errors import FatalSampleError
from moto.server import ThreadedMotoServer

from data_tools.sample_sizes import index_datasets
from megatron_vl.data.loader import build_loader, validation_rows
from megatron_vl.data.source import store_reading, tolerant_reader
from megatron_vl.data.source.dataset_description import read_description
from megatron_vl.data.source.energon_datasets import open_sample_reader
from megatron_vl.data.source.location import LoaderError, resolve_location
from megatron_vl.data.source.sample_order import LANES
from megatron_vl.data.source.store_reading import ReadAhead, reconnect_stores
from megatron_vl.data.source.tolerant_reader import BROKEN_FIELD
from megatron_vl.spec.families import read_spec
from tests.test_processes import wait_until
from tests.tiny import tiny_checkpoint

from .datasets import converted, mixed_records
from .media import write
from .test_loader import config, same

BUCKET = "rows"
STORED = "msc://images/sets/first"


def write_profile(folder: Path, name: str, url: str) -> Path:
    options = {"base_path": BUCKET, "endpoint_url": url, "region_name": "us-east-1"}
    settings = {"profiles": {name: {"storage_provider": {"type": "s3", "options": options}}}}
    return write(folder / "config.json", json.dumps(settings).encode())


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The client of a store with one bucket, which the profile ``images`` names."""
    multistorageclient.shortcuts._STORAGE_CLIENT_CACHE.clear()  # of another module's store
    patch = pytest.MonkeyPatch()
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        patch.setenv(f"AWS_{name}", "any")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")

    # A thread that writes to the log while a loader process is forked leaves that process a locked file.
    for name in ("werkzeug", "botocore", "urllib3", "multistorageclient"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    patch.setenv("MSC_CONFIG", str(write_profile(tmp_path_factory.mktemp("msc"), "images", url)))
    client = boto3.client("s3", endpoint_url=url)
    client.create_bucket(Bucket=BUCKET)
    yield client
    server.stop()
    patch.undo()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, store):
    folder = tmp_path_factory.mktemp("data")
    out, _ = converted(folder, mixed_records(folder / "media", 12), val_fraction=0.2, samples_per_shard=5)
    hf = tiny_checkpoint("qwen2_5_vl")
    index_datasets(config(out), read_spec(hf), hf)
    upload(store, out, "sets/first")
    return out


def upload(store, folder: Path, prefix: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.upload_file(str(path), BUCKET, f"{prefix}/{path.relative_to(folder)}")


def open_rows(path, **changes):
    hf = tiny_checkpoint("qwen2_5_vl")
    return build_loader(config(path, **changes), read_spec(hf), hf)


def rows(path, count: int, state=None, **changes):
    loader = open_rows(path, **changes)
    if state is not None:
        loader.load_state_dict(state)
    found = list(islice(loader, count))
    state = loader.state_dict()
    loader.close()
    return found, state


def assert_same(some: list, others: list) -> None:
    assert len(some) > 1 and all(same(one, other) for one, other in zip(some, others, strict=True))


def test_object_store_gives_the_rows_of_the_folder(dataset):
    """Also to a run that began with the folder: the identity is the content's."""
    here, _ = rows(dataset, 5)
    there, _ = rows(STORED, 5, num_workers=3)
    assert_same(here, there)
    _, state = rows(dataset, 2)
    rest, _ = rows(STORED, 3, state)
    assert_same(here[2:], rest)

    hf = tiny_checkpoint("qwen2_5_vl")
    both = (validation_rows(config(each), read_spec(hf), hf, "train") for each in (dataset, STORED))
    assert_same(*map(list, both))


def test_object_store_gives_documents_of_the_folder(store, tmp_path):
    """Each part of a long document is read on its own."""
    hf = tiny_checkpoint("qwen2_5_vl")
    texts, _ = converted(tmp_path, [{"text": "long " * 300}, {"text": "short"}])
    index_datasets(config(texts), read_spec(hf), hf)
    upload(store, texts, texts.name)
    here, _ = rows(texts, 6, seq_len=128)
    there, _ = rows(f"msc://images/{texts.name}", 6, seq_len=128)
    assert_same(here, there)
    assert "000000000#3" in {key for row in here for key in row.sample_keys}


def test_forked_process_opens_its_own_connections(dataset):
    """The client forgets its connections in a fork, but paths that exist already keep theirs."""
    loader = open_rows(STORED)
    data = loader._planning_context.datasets[0]
    before = data.path.fs
    multistorageclient.shortcuts._STORAGE_CLIENT_CACHE.clear()

    reconnect_stores([data])
    connections = {id(path.fs) for path in (data.path, *(shard.path for shard in data.shards))}
    assert len(connections) == 1 and data.path.fs is not before


@pytest.fixture
def requests(monkeypatch):
    read, names = store_reading._read_bytes, []

    def noted(path, start: int, end: int) -> bytes:
        names.append(path.name)
        return read(path, start, end)

    monkeypatch.setattr(store_reading, "_read_bytes", noted)
    return names


@pytest.fixture
def sets(dataset):
    local, stored = (open_rows(path)._planning_context.datasets[0] for path in (dataset, STORED))
    return stored, open_sample_reader(local, bytes)


@pytest.mark.parametrize(("ranks", "count"), [(1, 2), (5, 10)])
def test_block_is_read_with_one_request(sets, requests, ranks, count):
    """Two shards of 5 samples are two blocks of 16. Many ranks read single samples."""
    stored, local = sets
    ahead = ReadAhead([stored], 16, LANES, ranks)
    reader = open_sample_reader(stored, partial(ahead.take, 0))
    indices = [7, 2, 9, 0, 1, 3, 8, 6, 5, 4]
    ahead.expect((0, each) for each in indices)
    for each in indices:
        crude, expected = reader[each], local[each]
        assert crude | {"__sources__": ()} == expected | {"__sources__": ()}

    wait_until(lambda: not ahead._running_requests)
    assert not ahead._expected
    assert sum(name.endswith(".tar") for name in requests) == count
    kept = ahead._kept_bytes, len(ahead._requests), len(ahead._request_of_sample)
    assert kept == (0, 0, 0), "nothing is kept on"


def test_read_ahead_memory_is_bounded(sets, requests, monkeypatch):
    """With room for one sample or less, each is read alone, and when it is needed."""
    stored, local = sets
    monkeypatch.setattr(store_reading, "MAX_KEPT_BYTES", 1)
    monkeypatch.setattr(store_reading, "MAX_BLOCK_BYTES", 1)
    ahead = ReadAhead([stored], 16, LANES, 1)
    reader = open_sample_reader(stored, partial(ahead.take, 0))
    for _ in range(3):
        ahead.expect((0, each) for each in range(10))
        for each in range(10):
            assert reader[each]["json"] == local[each]["json"]
            assert len(ahead._requests) <= store_reading.MAX_REQUESTS + 1
    assert sum(name.endswith(".tar") for name in requests) == 30


def test_object_store_request_without_answer_costs_its_samples_alone(dataset, monkeypatch):
    read, never = store_reading._read_bytes, threading.Event()

    def stalls(path, start: int, end: int) -> bytes:
        if path.name == "train-000001.tar":
            never.wait()
        return read(path, start, end)

    monkeypatch.setattr(store_reading, "_read_bytes", stalls)
    monkeypatch.setattr(tolerant_reader, "SAMPLE_TIMEOUT_S", 1.0)
    found, _ = rows(STORED, 12, num_workers=2, max_bad_share=1.0)
    never.set()
    dropped = {one.key: one.reason for row in found for one in row.dropped_samples}
    assert dropped == {f"train-000001.tar[{i}]": "reading takes too long" for i in range(5)}
    assert len({key for row in found for key in row.sample_keys}) == 5


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError("status_code: 404"), "shard missing"),
        (RuntimeError("Failed to read. status_code: 416"), "shard unreadable"),
        (PermissionError("Permission denied. status_code: 403"), ""),
    ],
)
def test_object_store_errors_that_are_permanent_are_not_retried(sets, monkeypatch, error, reason):
    """Refused access stops the run: it says nothing about a sample."""
    stored, _ = sets

    def fails(*_: object, **__: object) -> bytes:
        raise error

    monkeypatch.setattr(type(stored.path.fs), "read", fails)
    monkeypatch.setattr("megatron_vl.system.errors.RETRY_WAITS_S", (600.0,))
    reader = open_sample_reader(stored, partial(ReadAhead([stored], 16, LANES, 1).take, 0))
    if reason:
        assert reader[0][BROKEN_FIELD][0] == reason
        return
    with pytest.raises(FatalSampleError, match="Permission denied.* check the credentials"):
        reader[0]


def test_killed_reading_process_ends_the_run(dataset):
    loader = open_rows(STORED, num_workers=2)
    next(loader)
    os.kill(loader._rank_rows._store_samples._manager._process.pid, signal.SIGKILL)
    with closing(loader), pytest.raises(LoaderError, match="reads from the object store has ended"):
        for _ in range(100):
            next(loader)


def test_object_store_rejects_names_that_leave_the_folder(dataset, store, tmp_path):
    copy = shutil.copytree(dataset / ".nv-meta", tmp_path / "copy")
    for number, name in enumerate(("../first/x.tar", "/other/x.tar", "msc://images/x.tar")):
        split = {"split_parts": {"train": [name]}, "exclude": []}
        (copy / "split.yaml").write_text(yaml.safe_dump(split))
        upload(store, copy, f"sets/bad{number}/.nv-meta")
        with pytest.raises(LoaderError, match="is not inside"):
            read_description(resolve_location(f"msc://images/sets/bad{number}"))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("msc://images/sets/none", "is not a data set"),
        ("gs://rows/sets/first", "msc://PROFILE/FOLDER"),
        ("msc://unknown/sets/first", "MSC_CONFIG names must describe the profile"),
    ],
)
def test_object_store_names_what_is_missing(store, place, message):
    with pytest.raises(LoaderError, match=message):
        read_description(resolve_location(place))


def test_object_store_without_answer_is_named(monkeypatch, tmp_path):
    """Not a data set that is missing: the user would look for the wrong thing."""
    monkeypatch.setenv("MSC_CONFIG", str(write_profile(tmp_path, "gone", "http://127.0.0.1:9")))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(LoaderError, match="cannot be read"):
        read_description(resolve_location("msc://gone/sets/first"))
