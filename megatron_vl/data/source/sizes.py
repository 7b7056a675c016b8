"""Sizes of all samples of a data set, so that batches are planned without reading the samples.

``megatron-vl data index`` writes a folder ``.nv-meta/sizes/ID`` for each way in which text becomes tokens
(see :func:`text_id`). It holds facts of the data only: the tokens of each sample's text, and the sizes of its
media as they are stored. Patches and placeholders follow from the settings of the run that reads them.

* ``samples.npy``: :data:`SAMPLE`, 12 bytes for each sample.
* ``media.npy``: :data:`MEDIUM`, 21 bytes for each picture or video.
* ``shards.json``: the id of the data set's content and, of each shard in the order of the other two files,
  its samples, the assistant's turns in them, and those that cannot be used by reason.

10^8 samples with one picture each take 3.3 GB. The files are mapped into memory, so that a process reads only
the pages that it needs, and the processes of a node share them.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_vl.config import DataConfig, video_rule
from megatron_vl.data.sample.chat import ChatEncoder, read_chat_template
from megatron_vl.data.sample.frame_files import Sampling
from megatron_vl.data.sample.pixels import PixelError, PixelSettings, VideoInfo, image_grid, video_grid
from megatron_vl.data.source.description import META, SIZES, DataSet, Description
from megatron_vl.data.source.location import Location, is_file, read_text
from megatron_vl.errors import UserError
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.positions import GridTHW

SHARDS = "shards.json"
VERSION = 1
SAMPLE = np.dtype([("tokens", "<u4"), ("media_end", "<u8")])
"""Tokens of the text (0: the sample cannot be used), and number of media of all samples up to this one."""
MEDIUM = np.dtype([("height", "<u4"), ("width", "<u4"), ("frames", "<u4"), ("fps", "<f8"), ("whole", "u1")])
"""A picture has no frames. ``whole``: the video is a list of pictures that is taken whole (``VideoInfo``)."""

type Medium = tuple[int, int, int, float, int]

Integers = NDArray[np.int64]


class SizesError(UserError, ValueError):
    """Stored sizes that cannot be used. The message says why."""


def text_id(hf_dir: str | Path, spec: ModelSpec, data: DataConfig) -> str:
    """Names the way in which text becomes tokens: tokenizer, chat template, and text written around videos.

    No tokenizer is built for this.
    """
    folder = Path(hf_dir)
    digest = hashlib.sha256(read_chat_template(folder).encode())
    whole = folder / "tokenizer.json"
    names = [whole] if whole.is_file() else [folder / "vocab.json", folder / "merges.txt"]
    for path in names:
        digest.update(path.read_bytes() if path.is_file() else b"")
    special = [spec.image_token_id, spec.video_token_id, spec.vision_start_token_id, spec.vision_end_token_id]
    timestamps = spec.vision.video_timestamps
    # The other rule is about positions, which do not change the number of tokens.
    rule = video_rule(data, timestamps) if timestamps else {}
    digest.update(json.dumps([VERSION, special, rule]).encode())
    return digest.hexdigest()[:16]


def has_sizes(data: DataSet, name: str) -> bool:
    """Whether a data set has sizes of its present content.

    Args:
        name: the :func:`text_id` of the run.
    """
    path = data.path / META / SIZES / name / SHARDS
    try:
        return is_file(path) and json.loads(read_text(path))["content"] == data.uuid
    except (OSError, ValueError, KeyError, TypeError):
        return False


def without_sizes(
    description: Description, hf_dir: str | Path, data: DataConfig, split: str = "train"
) -> list[DataSet]:
    """The data sets of a split that have no sizes for this tokenizer and chat template, each once.

    Raises:
        LoaderError: there is no such split.
    """
    name = text_id(hf_dir, read_spec(hf_dir), data)
    by_path = {str(one.path): one for one, _ in read_by(description, split)}
    return [one for one in by_path.values() if not has_sizes(one, name)]


def why_no_sizes(description: Description, hf_dir: str | Path, data: DataConfig, split: str = "train") -> str:
    """Which data set of a split has no sizes, and the command that writes them; empty if all have some.

    Raises:
        LoaderError: there is no such split.
    """
    lacking = without_sizes(description, hf_dir, data, split)
    if not lacking:
        return ""

    given = f"--data {data.path} --processor {hf_dir}"
    timestamps = read_spec(hf_dir).vision.video_timestamps
    if timestamps and data.video_prompt != DataConfig.video_prompt:
        given = "--config RUN.yaml"  # the rule for the text around videos is a field of the run
    return (
        f"{lacking[0].path} has no sizes for this tokenizer and chat template: run"
        f" `megatron-vl data index {given}`"
    )


def data_sets(description: Description) -> list[DataSet]:
    """A data set, or all data sets that a metadataset names, each once."""
    if isinstance(description, DataSet):
        return [description]
    inner = [found for part in description.inner.values() for found in data_sets(part)]
    return list({str(one.path): one for one in inner}.values())


def read_by(description: Description, split: str) -> Iterator[tuple[DataSet, str]]:
    """The data sets that a split reads, each with its own split that is read; in the order of a blend's
    sources."""
    if isinstance(description, DataSet):
        yield description, split
        return
    for inner, part in description.parts(split):
        yield from read_by(inner, part)


@dataclass(frozen=True)
class StoredSizes:
    """The sizes of one data set as they are stored."""

    samples: Any
    media: Any
    starts: dict[str, tuple[int, int]]
    """For each shard, the number of its first sample in ``samples``, and how many it has."""
    content: str
    """Id of the data set's content that they are of."""
    shards: dict[str, dict[str, Any]]
    """``samples``, ``turns`` (the assistant's, in usable samples) and ``unusable`` (samples by reason) of
    each shard."""

    def numbers(self, shards: Sequence[tuple[str, int]]) -> Integers:
        """The number in ``samples`` of the first sample of each of these shards.

        Args:
            shards: name and number of samples.

        Raises:
            SizesError: the sizes are of other shards.
        """
        for name, count in shards:
            if self.starts.get(name, (0, -1))[1] != count:
                raise SizesError(f"the sizes are of another data set: they do not hold {count} of {name}")
        return np.array([self.starts[name][0] for name, _ in shards], np.int64)

    def media_of(self, numbers: Integers) -> tuple[Integers, Integers]:
        """Numbers in ``media`` of the first medium of samples and of the one after their last, int64 [n]."""
        ends = self.samples["media_end"][numbers].astype(np.int64)
        before = self.samples["media_end"][np.maximum(numbers - 1, 0)].astype(np.int64)
        return np.where(numbers > 0, before, 0), ends


def open_sizes(meta: Location, name: str) -> StoredSizes:
    """Opens the sizes of a data set. Those in an object store are copied into memory.

    Raises:
        SizesError: they are missing or damaged.
    """
    folder = meta / SIZES / name
    try:
        described = json.loads(read_text(folder / SHARDS))
        shards, content = described["shards"], str(described["content"])
        counts = [(name, one["samples"]) for name, one in shards.items()]
        samples, media = (_array(folder / f"{part}.npy") for part in ("samples", "media"))
        ends = np.cumsum([0, *(count for _, count in counts)])
        starts = {shard: (int(start), count) for (shard, count), start in zip(counts, ends[:-1], strict=True)}
        held = int(samples[-1]["media_end"]) if len(samples) else 0
        whole = samples.dtype == SAMPLE and media.dtype == MEDIUM and held == len(media)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        zipfile.BadZipFile,
    ) as error:
        raise SizesError(
            f"{folder} cannot be read ({error}); write it with `megatron-vl data index`, where every node can"
            " read it"
        ) from error
    if not whole or ends[-1] != len(samples):
        raise SizesError(
            f"{folder} is damaged: its files do not fit together; delete it and run `megatron-vl data index`"
        )
    return StoredSizes(samples, media, starts, content, shards)


def _array(path: Location) -> Any:
    if isinstance(path, Path):
        return np.load(path, mmap_mode="r", allow_pickle=False)
    return np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)


class SampleSizes:
    """Counts tokens and patches of samples from their stored sizes, as the loader does.

    Args:
        chat: counts the tokens that a medium adds to a text.
        settings: of the run.
    """

    def __init__(self, chat: ChatEncoder, settings: PixelSettings) -> None:
        self.chat, self.settings = chat, settings
        self._known: dict[bytes, int] = {}
        """For each medium as it is stored, its tokens x 2^32 + patches."""

    def of(self, stored: StoredSizes, numbers: Integers) -> tuple[Integers, Integers]:
        """Tokens and patches int64 [n] of samples; 0 tokens if one cannot be used.

        Args:
            numbers: int64 [n], numbers in ``stored.samples``.
        """
        tokens = stored.samples["tokens"][numbers].astype(np.int64)
        begins, ends = stored.media_of(numbers)
        counts = np.where(tokens > 0, ends - begins, 0)
        owners = np.repeat(np.arange(len(numbers)), counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        more_tokens, patches = np.divmod(
            self._of_media(stored.media[np.repeat(begins, counts) + within]), 1 << 32
        )
        # No other medium makes a sample usable again.
        more_tokens[more_tokens == 0] = -(1 << 40)
        np.add.at(tokens, owners, more_tokens)
        usable = tokens > 0
        found = np.zeros_like(tokens)
        np.add.at(found, owners, patches)
        return np.where(usable, tokens, 0), np.where(usable, found, 0)

    def _of_media(self, media: NDArray[np.void]) -> Integers:
        """Tokens x 2^32 + patches of media, int64 [n]; 0 if one cannot be used."""
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        keys = np.ascontiguousarray(media).view(f"V{MEDIUM.itemsize}").tolist()
        fresh = [number for number, key in enumerate(keys) if key not in self._known]
        for number, medium in zip(fresh, media[fresh].tolist(), strict=True):
            try:
                grid = self._grid(*medium)
                self._known[keys[number]] = (self.chat.medium_tokens(grid) << 32) + grid.patches
            except PixelError:
                self._known[keys[number]] = 0
        return np.fromiter(map(self._known.__getitem__, keys), np.int64, len(keys))

    def _grid(self, height: int, width: int, frames: int, fps: float, whole: int) -> GridTHW:
        if not frames:
            return image_grid(height, width, self.settings)
        sampling: Sampling = "whole" if whole else "as a file"
        return video_grid(VideoInfo(frames, fps, height, width, sampling), self.settings)


MOST_KNOWN = 1 << 20
"""Number of different media whose counts are remembered, about 150 bytes each."""
