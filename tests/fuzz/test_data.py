"""Sends mutated records and images through the data tool, and mutated samples and shards through the loader.

Nothing may hang, crash, exhaust the memory or be dropped uncounted: records in = samples out + refused, and
every sample of the shards is in a row or named among the dropped ones.
"""

import json
import multiprocessing
import random
import resource
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_tools.convert import ConversionOptions, convert_dataset
from megatron_vl.config import DataConfig
from megatron_vl.data.sample.chat import ChatEncoder
from megatron_vl.data.sample.frame_archive import FrameArchiveInfo, pack_frames
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.tolerant_reader import append_crc32
from megatron_vl.spec.families import read_spec
from tests.data.datasets import mixed_records, open_loader
from tests.data.media import encoded, video
from tests.data.pair_tars import read_tar, write_tar
from tests.fuzz.mutations import BYTE_CHANGES, cut, edited, flipped, noise, numbers
from tests.tiny import tiny_checkpoint

FORK = multiprocessing.get_context("fork")
KINDS = "png webp jpeg jpeg420 progressive grey rgba palette cmyk exif grey16 bilevel".split()
COUNT = 5000


@pytest.mark.full
def test_mutated_records_and_samples_are_used_or_counted(tmp_path: Path) -> None:
    tool = fuzz_tool(tmp_path, random.Random(0))
    assert tool["used"] > 300 and len(tool) > 12
    loader = fuzz_loader(tmp_path / "out", random.Random(0))
    assert loader["used"] > 100 and len(loader) > 6


def unchanged(data: bytes, draw: random.Random) -> bytes:
    return data


def medium(draw: random.Random) -> tuple[str, bytes]:
    """Kind and bytes of an image or video, mutated or not."""
    if draw.random() < 0.1:
        return "video", draw.choice([*BYTE_CHANGES, unchanged])(draw.choice([_VIDEO, _FRAMES]), draw)
    return "image", draw.choice([*BYTE_CHANGES, unchanged])(draw.choice(_IMAGES), draw)


_IMAGES = [encoded(30 + 9 * i, 90 - 5 * i, kind, seed=i) for i, kind in enumerate(KINDS)]
_VIDEO = video(6, 64, 64)
_FRAMES = pack_frames(
    ((f"{i}.png", encoded(30, 40, seed=i)) for i in range(5)), FrameArchiveInfo(2.0, "whole")
)


def line_of(i: int, base: list[Any], media: Path, draw: random.Random) -> bytes:
    """A line of a JSON-lines file: a record with a mutated medium, an edited record, or mutated bytes."""
    how = draw.choice(["medium", "medium", "record", "record", "bytes", "encoding"])
    record = draw.choice(base)
    if how == "medium":
        kind, data = medium(draw)
        (media / f"fuzz/{i}.bin").write_bytes(data)
        turns = [{"from": "human", "value": f"<{kind}>What?"}, {"from": "gpt", "value": f"It is {i}."}]
        return json.dumps({"id": i, kind: f"fuzz/{i}.bin", "conversations": turns}).encode()
    if how == "record":
        for _ in range(draw.choice([1, 1, 2, 5])):
            record, _ = edited(record, draw)
        return json.dumps(record).encode()
    line = json.dumps(record, ensure_ascii=False).encode()
    if how == "encoding":
        encoding = draw.choice(["utf-16", "latin-1", "utf-8-sig", "cp037"])
        return line.decode().replace("What", "Wäs").encode(encoding)
    return draw.choice(BYTE_CHANGES)(line, draw)


def fuzz_tool(folder: Path, draw: random.Random) -> Counter[str]:
    """Converts mutated records to ``folder/out``. Returns how many were used, and refused for each reason."""
    media = folder / "media"
    (media / "fuzz").mkdir(parents=True)
    base = mixed_records(media, 20)
    source = folder / "in.jsonl"
    source.write_bytes(b"\n".join(line_of(i, base, media, draw) for i in range(COUNT)) + b"\n")
    lines = [i for i, line in enumerate(source.read_bytes().split(b"\n"), 1) if line.strip()]
    options = ConversionOptions(media, folder / "out", workers=2, samples_per_shard=COUNT // 100)
    report = _guarded(lambda: convert_dataset([source], options), 60 + COUNT * 0.2)
    listed = [json.loads(line) for line in (folder / "out/quarantine.jsonl").read_text().splitlines()]

    assert report.records == len(lines), f"{len(lines)} lines, {report.records} records"
    assert report.samples + len(listed) == report.records
    assert sum(sum(reasons.values()) for reasons in report.refused.values()) == len(listed)
    assert all(line["reason"] and line["detail"] and line["file"] == "in.jsonl" for line in listed)

    used = {
        json.loads(v["json"])["source"]["record"]
        for s in sorted((folder / "out").glob("*.tar"))
        for v in read_tar(s).values()
    }
    assert sorted([*used, *(line["record"] for line in listed)]) == lines
    _used_little_memory()
    return Counter([line["reason"] for line in listed], used=report.samples)


def _mutated(members: dict[str, bytes], draw: random.Random) -> dict[str, bytes]:
    """A stored sample with edited text or media and matching checksums, as if it had been converted so."""
    record = json.loads(members["json"])
    record.pop("crc32", None)
    out = dict(members)
    how = draw.choice(["text", "media", "bytes", "member"])
    if how == "text":
        record, _ = edited(record, draw)
    names = [name for name in members if name != "json"]
    if how == "media" and names:
        name = draw.choice(names)
        out[name] = draw.choice([*BYTE_CHANGES, unchanged])(members[name] or b"x", draw)
        for item in record["media"]:
            if item["key"] == name:
                item["crc32"] = zlib.crc32(out[name])

    if how == "member" and names:
        del out[draw.choice(names)]
    text = json.dumps(record).encode()
    out["json"] = append_crc32(text) if isinstance(record, dict) and record else text
    if how == "bytes":
        out["json"] = draw.choice([*BYTE_CHANGES, unchanged])(out["json"], draw)

    return out


def _rewrite(shard: Path, samples: list[tuple[str, dict[str, bytes]]]) -> None:
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    members = ((f"{key}.{part}", data) for key, parts in samples for part, data in parts.items())
    write_tar(shard, members, tarfile.USTAR_FORMAT)
    list(WebdatasetPreparator._preprocess_tar(shard.name, {shard.name: 0}, EPath(shard.parent), max_parts=0))


def _damage(shard: Path, draw: random.Random) -> None:
    target = draw.choice([shard, shard, shard.with_suffix(".tar.idx")])
    target.write_bytes(draw.choice([flipped, cut, numbers, noise])(target.read_bytes(), draw))


def fuzz_loader(out: Path, draw: random.Random) -> Counter[str]:
    """Sends mutated samples of the data set ``out`` through the loader, in whole rounds."""
    hf = tiny_checkpoint("qwen2_5_vl")
    ChatEncoder(hf, read_spec(hf))  # slow imports, before the forks
    shards = sorted(out.glob("*.tar"))
    pristine = {shard: ([*read_tar(shard).items()], shard.read_bytes()) for shard in shards}
    num_samples = sum(len(samples) for samples, _ in pristine.values())
    outcomes: Counter[str] = Counter()
    total = 0

    while total < COUNT:
        places: dict[str, str] = {}
        is_damaged = False
        for shard, (samples, _) in pristine.items():
            _rewrite(shard, [(key, _mutated(members, draw)) for key, members in samples])
            if draw.random() < 0.2:
                _damage(shard, draw)
                is_damaged = True
            places |= {f"{shard.name}[{i}]": key for i, (key, _) in enumerate(samples)}
        total += len(places)
        try:
            used, dropped = _guarded(lambda: _read_all(out, num_samples), 60 + 2 * num_samples)
        except LoaderError as error:  # no size is written of what storage cannot read
            assert is_damaged and "shard unreadable" in str(error)
            outcomes["refused"] += 1
            continue
        dropped = {places.get(key, key): reason for key, reason in dropped.items()}
        missing = set(places.values()) - used - dropped.keys()
        assert not missing, f"neither in a row nor counted: {sorted(missing)[:5]}"
        outcomes.update(dropped.values(), used=len(used))

    _used_little_memory()
    return outcomes


def _read_all(out: Path, samples: int) -> tuple[set[str], dict[str, str]]:
    """Reads every sample at least once: the keys of used samples, and why others are left out."""
    pixels = {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 24}
    fixed = {"seq_len": 1024, "num_workers": 0, "shuffle": False}
    rows = open_loader(DataConfig(path=str(out), **fixed, **pixels), tiny_checkpoint("qwen2_5_vl"))
    used: set[str] = set()
    dropped: dict[str, str] = {}
    seen = 0
    for row in rows:
        seen += row.num_samples + len(row.dropped_samples)
        dropped |= {sample.key: sample.reason for sample in row.dropped_samples}
        used |= set(row.sample_keys)
        if seen > 2 * samples + 64:  # the packer holds 64 samples back
            break
    rows.close()
    return used - dropped.keys(), dropped


def _guarded(work: Callable[[], Any], seconds: float) -> Any:
    """Runs ``work`` in a separate process; a crash and a hang both fail."""

    def alone() -> None:
        # As in a loader's worker: OpenMP's threads do not survive the fork, and whoever waits for them hangs.
        torch.set_num_threads(1)
        try:
            send.send(work())
        except LoaderError as error:
            send.send(error)

    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=alone)
    process.start()
    send.close()
    try:
        if not receive.poll(seconds):
            raise AssertionError(f"no result within {seconds:.0f} s: it hangs")
        result = receive.recv()
        if isinstance(result, LoaderError):
            raise result
        return result
    except EOFError as error:
        process.join(10)
        raise AssertionError(f"the process ended with exit code {process.exitcode}") from error
    finally:
        process.kill()
        process.join(10)


def _used_little_memory() -> None:
    peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    assert peak_gib < 4, f"{peak_gib:.1f} GiB of memory for small images"
