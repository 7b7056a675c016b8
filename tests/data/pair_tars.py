"""Tars of image-text pairs for the tests, written as other tools write them."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

from data_tools.sample_sources import open_encoder
from data_tools.tar_index import TarIndex, TarReport, find_tars, index_tars
from megatron_vl.config import DataConfig
from megatron_vl.data.source.sample_sizes import compute_tokenization_id
from megatron_vl.data.source.tar_list import parse_fields
from megatron_vl.spec.families import read_spec

from .media import encoded

KINDS = ("jpeg", "png", "exif", "webp", "grey_jpeg")
SUFFIXES = {"jpeg": "jpg", "exif": "jpg", "grey_jpeg": "jpg"}


def pair_members(key: str, number: int, caption: str, *, in_json: bool = False) -> list[tuple[str, bytes]]:
    kind = KINDS[number % len(KINDS)]
    image = encoded(40 + 11 * (number % 7), 60 + 17 * (number % 5), kind, seed=number)
    text = json.dumps({"caption": caption, "url": "u"}).encode() if in_json else caption.encode()
    return [(f"{key}.{SUFFIXES.get(kind, kind)}", image), (f"{key}.{'json' if in_json else 'txt'}", text)]


def read_tar(path: Path) -> dict[str, dict[str, bytes]]:
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as tar_file:
        for member in tar_file:
            key, _, extension = member.name.partition(".")
            samples.setdefault(key, {})[extension] = tar_file.extractfile(member).read()
    return samples


def write_tar(
    path: Path,
    members: Iterable[tuple[str, bytes] | tarfile.TarInfo],
    form: int = tarfile.PAX_FORMAT,
    mode: str = "w",
) -> Path:
    """Writes files, given as names and contents, and members without content; the mode "a" adds them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=form) as tar_file:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar_file.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            tar_file.addfile(info, io.BytesIO(member[1]))
    return path


def write_pair_tars(folder: Path, tars: int, pairs: int) -> list[str]:
    """Tars ``00000.tar``, ... of pairs; every second tar has captions in JSON. Returns all captions."""
    captions = []
    for tar in range(tars):
        members = []
        for i in range(pairs):
            number = tar * pairs + i
            captions.append(f"An image with the number {number}, {'very ' * (number % 4)}small")
            members += pair_members(f"{tar:05d}{i:04d}", number, captions[-1], in_json=tar % 2 == 1)
        write_tar(folder / f"{tar:05d}.tar", members)
    return captions


def index(out: Path, hf: Path, *inputs: object, members: tuple[str, ...] = (), workers: int = 1) -> TarReport:
    data, spec = DataConfig(path=str(out)), read_spec(hf)
    encoder, sizes_name = open_encoder(data, spec, hf), compute_tokenization_id(hf, spec, data)
    tars = find_tars([str(one) for one in inputs])
    return index_tars(TarIndex(*tars, out, parse_fields(members), encoder, sizes_name), workers)
