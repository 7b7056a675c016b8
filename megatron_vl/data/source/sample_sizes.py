"""Sizes of all samples of a data set, so that batches are planned without reading the samples.

``megatron-vl data index`` writes a folder ``.nv-meta/sizes/ID`` for each way in which text becomes tokens
(see :func:`compute_tokenization_id`). It holds facts of the data only: the tokens of each sample's text, and
the sizes of its media as they are stored. Patches and placeholders follow from the settings of the run that
reads them.

* ``samples.npy``: :data:`SAMPLE_DTYPE`, 12 bytes for each sample.
* ``media.npy``: :data:`MEDIUM_DTYPE`, 21 bytes for each image or video, and for each coordinate of a box that
  has more or fewer digits under other settings.
* ``documents.npy`` and ``text_before.npy``, if there are documents: whether each sample is one, 1 byte, and
  the number of tokens of text before each medium, 4 bytes. They say where a document can be cut.
* ``limits.npy`` and ``limits_end.npy``, if media have limits of their own: these as JSON, in order, and
  the byte at which those of each medium end, 8 bytes.
* ``exchanges.npy`` and ``exchange_ends.npy``, if there are conversations with several exchanges:
  :data:`EXCHANGE_DTYPE`, 8 bytes for each of them, and their number up to each sample, 8 bytes. They say
  where a conversation can be cut.
* ``shards.json``: the id of the data set's content; the samples that its description excludes, which have no
  tokens here; and of each shard, in the order of the other files, its samples, the assistant's turns in them,
  and those that cannot be used by reason.

10^8 samples with one image each take 3.3 GB. The files are mapped into memory, so that a process reads only
the pages that it needs, and the processes of a node share them.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_vl.config import DataConfig
from megatron_vl.data.sample.boxes import FRAMES, frame_sizes, scale_number
from megatron_vl.data.sample.chat import ChatEncoder
from megatron_vl.data.sample.chat_template import read_run_template
from megatron_vl.data.sample.frame_archive import PixelError
from megatron_vl.data.sample.medium import stored_media_grid
from megatron_vl.data.sample.parts import SamplePart, cut_conversation, cut_document
from megatron_vl.data.sample.pixel_settings import PixelSettings
from megatron_vl.data.source.dataset_description import (
    METADATA_DIR,
    SIZES_DIR,
    DatasetDescription,
    Description,
)
from megatron_vl.data.source.location import LoaderError, Location, location_is_file, read_text_file
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.positions import GridTHW

SHARDS_FILE = "shards.json"
SIZES_VERSION = 3
SAMPLE_DTYPE = np.dtype([("tokens", "<u4"), ("media_end", "<u8")])
"""Tokens of the text (0: the sample cannot be used), and number of media of all samples up to this one."""
MEDIUM_DTYPE = np.dtype(
    [("height", "<u4"), ("width", "<u4"), ("frames", "<u4"), ("fps", "<f8"), ("whole", "u1")]
)
"""An image has 0 frames. ``whole`` says that the video is a list of images that is taken whole
(:class:`~megatron_vl.data.sample.grids.VideoInfo`)."""
EXCHANGE_DTYPE = np.dtype([("text_before", "<u4"), ("media_before", "<u4")])
"""Tokens of the sample's text, and number of its media, before an exchange of a conversation."""
OPTIONAL_ARRAYS = (("documents", "text_before"), ("limits", "limits_end"), ("exchanges", "exchange_ends"))
"""Files, without ``.npy``: those of documents, of media with limits of their own, and of exchanges. They are
there if there are such."""

COORDINATE = (1 << 32) - 1
"""Frames of a row that is a coordinate on an image: ``fps`` is its number, ``whole`` twice the index of its
frame in :data:`~megatron_vl.data.sample.boxes.FRAMES`, plus 1 for y. Qwen's tokenizers make a token of each
digit."""

type MediumFields = tuple[int, int, int, float, int]

Integers = NDArray[np.int64]


def compute_tokenization_id(hf_dir: str | Path, spec: ModelSpec, data_config: DataConfig) -> str:
    """An id of what turns text into tokens: tokenizer, chat template and its arguments, text around videos.

    It is a hash of files. No tokenizer is built.
    """
    hf_path = Path(hf_dir)
    hasher = hashlib.sha256(read_run_template(hf_path, data_config.chat_template).encode())
    if data_config.template_arguments:
        hasher.update(json.dumps(data_config.template_arguments, sort_keys=True).encode())
    tokenizer_files = [hf_path / "tokenizer.json"]
    if not tokenizer_files[0].is_file():
        tokenizer_files = [hf_path / "vocab.json", hf_path / "merges.txt"]
    for file_path in tokenizer_files:
        hasher.update(file_path.read_bytes() if file_path.is_file() else b"")
    special_token_ids = (
        *(spec.image_token_id, spec.video_token_id),
        *(spec.vision_start_token_id, spec.vision_end_token_id),
    )
    # A family that writes timestamps leaves out the pair of tokens around a video.
    text_rules = [SIZES_VERSION, special_token_ids, spec.vision.video_timestamps]
    if spec.vision.box_tokens:  # Qwen2-VL and Qwen2.5-VL may have one template, and write boxes otherwise
        text_rules.append("box tokens")
    hasher.update(json.dumps(text_rules).encode())
    return hasher.hexdigest()[:16]


def has_stored_sizes(dataset_description: DatasetDescription, tokenization_id: str) -> bool:
    """Whether a data set has sizes of its present content, of all shards of its splits.

    Args:
        tokenization_id: the :func:`compute_tokenization_id` of the run.
    """
    path = dataset_description.path / METADATA_DIR / SIZES_DIR / tokenization_id / SHARDS_FILE
    try:
        if not location_is_file(path):
            return False
        json_fields = json.loads(read_text_file(path))
        # A shard that was excluded when the sizes were written may be back.
        measured_shards = {name: facts["samples"] for name, facts in json_fields["shards"].items()}
        return json_fields["content"] == dataset_description.content_id and all(
            measured_shards.get(name, -1) == dataset_description.samples_by_shard.get(name)
            for name in set().union(*dataset_description.shards_by_split.values())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def find_datasets_without_sizes(
    description: Description, hf_dir: str | Path, data_config: DataConfig, split_name: str = "train"
) -> list[DatasetDescription]:
    """The data sets of a split that have no sizes for this tokenizer and chat template. Each is listed once.

    Raises:
        LoaderError: there is no such split.
    """
    tokenization_id = compute_tokenization_id(hf_dir, read_spec(hf_dir), data_config)
    datasets = [dataset for dataset, _ in description.split_parts(split_name)]
    parts_by_path = {str(part.path): part for each in datasets for part in each.parts or (each,)}
    return [part for part in parts_by_path.values() if not has_stored_sizes(part, tokenization_id)]


def missing_sizes_advice(
    description: Description, hf_dir: str | Path, data_config: DataConfig, split_name: str = "train"
) -> str:
    """Names a data set of a split that has no sizes, and the command that writes them; empty if all have
    sizes.

    Raises:
        LoaderError: there is no such split.
    """
    datasets_lacking_sizes = find_datasets_without_sizes(description, hf_dir, data_config, split_name)
    if not datasets_lacking_sizes:
        return ""

    given_template, arguments = data_config.chat_template, data_config.template_arguments
    template_words = f" --data.chat_template {given_template}" if given_template else ""
    template_words += f" --data.template_arguments '{json.dumps(arguments)}'" if arguments else ""
    return (
        f"{datasets_lacking_sizes[0].path} has no sizes for this tokenizer and chat template: run"
        f" `megatron-vl data index --data.path {data_config.path} --model.hf {hf_dir}{template_words}`"
    )


def list_all_datasets(description: Description) -> list[DatasetDescription]:
    """A data set or its parts, or those that a metadataset names, each once."""
    datasets = (
        [description]
        if isinstance(description, DatasetDescription)
        else [*description.dataset_by_path.values()]
    )
    return list({str(part.path): part for each in datasets for part in each.parts or (each,)}.values())


@dataclass(frozen=True)
class StoredSizes:
    """The sizes of one data set as they are stored."""

    sample_records: Any
    medium_records: Any
    shard_ranges: dict[str, tuple[int, int]]
    """For each shard, the number of its first sample in ``sample_records``, and its number of samples."""
    content_id: str
    """Id of the content to which the sizes belong."""
    shard_facts: dict[str, dict[str, Any]]
    """For each shard: its number of ``samples``, of the assistant's ``turns`` in usable samples, and of
    ``unusable`` samples by reason."""
    document_flags: Any = None
    """bool [samples]: whether each sample is a document that may be cut; None: none is."""
    text_before: Any = None
    """uint32 [media]: number of tokens of text before each medium of a document."""
    limit_texts: Any = None
    """uint8 [bytes]: the own limits of media as JSON; None: no medium has any."""
    limits_end: Any = None
    """uint64 [media]: where those of each medium end."""
    exchanges: Any = None
    """:data:`EXCHANGE_DTYPE` of the exchanges of all conversations that have several; None: none has."""
    exchange_ends: Any = None
    """uint64 [samples]: number of exchanges of all samples up to this one."""

    def own_limits(self, medium_numbers: Integers) -> list[bytes]:
        """The own limits of media as JSON; empty for a medium that has none."""
        if self.limits_end is None:
            return [b""] * len(medium_numbers)
        starts, ends = _ranges(self.limits_end, medium_numbers)
        return [
            self.limit_texts[start:end].tobytes() if end > start else b""
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]

    def first_sample_numbers(self, named_shards: Sequence[tuple[str, int]]) -> Integers:
        """The number in ``sample_records`` of the first sample of each of these shards, int64 [shards].

        Args:
            named_shards: name and number of samples of each shard.

        Raises:
            LoaderError: the sizes belong to other shards.
        """
        for name, count in named_shards:
            if self.shard_ranges.get(name, (0, -1))[1] != count:
                raise LoaderError(f"the sizes are of another data set: they do not hold {count} of {name}")
        return np.array([self.shard_ranges[name][0] for name, _ in named_shards], np.int64)

    def media_ranges(self, sample_numbers: Integers) -> tuple[Integers, Integers]:
        """The media of samples: numbers in ``medium_records`` of the first one and of the one after the last,
        int64 [n] each."""
        return _ranges(self.sample_records["media_end"], sample_numbers)

    def exchanges_of(self, sample_number: int) -> list[tuple[int, int]]:
        """:data:`EXCHANGE_DTYPE` of a conversation; nothing unless it has several exchanges."""
        if self.exchanges is None:
            return []
        starts, ends = _ranges(self.exchange_ends, np.array([sample_number]))
        return self.exchanges[starts[0] : ends[0]].tolist()


def _ranges(ends: Any, numbers: Integers) -> tuple[Integers, Integers]:
    """The first entry of some samples, and the one after their last, where ``ends`` counts those of all
    samples up to each."""
    starts = ends[np.maximum(numbers - 1, 0)].astype(np.int64)
    return np.where(numbers > 0, starts, 0), ends[numbers].astype(np.int64)


def open_stored_sizes(metadata_dir: Location, tokenization_id: str) -> StoredSizes:
    """Opens the sizes of a data set. Those in an object store are copied into memory.

    Raises:
        LoaderError: they are missing or damaged.
    """
    sizes_dir = metadata_dir / SIZES_DIR / tokenization_id
    try:
        json_fields = json.loads(read_text_file(sizes_dir / SHARDS_FILE))
        shard_facts, content_id = json_fields["shards"], str(json_fields["content"])
        sample_records = _load_array(sizes_dir / "samples.npy")
        medium_records = _load_array(sizes_dir / "media.npy")

        optional_arrays: list[Any] = [
            _load_array(sizes_dir / f"{name}.npy") if location_is_file(sizes_dir / f"{pair[0]}.npy") else None
            for pair in OPTIONAL_ARRAYS
            for name in pair
        ]
        document_flags, text_before, _, limits_end, exchanges, exchange_ends = optional_arrays

        shard_ranges = {}
        sample_total = 0
        for name, facts in shard_facts.items():
            shard_ranges[name] = (sample_total, facts["samples"])
            sample_total += facts["samples"]
        media_count = int(sample_records[-1]["media_end"]) if len(sample_records) else 0
        is_consistent = (
            sample_records.dtype == SAMPLE_DTYPE
            and medium_records.dtype == MEDIUM_DTYPE
            and media_count == len(medium_records)
            and (document_flags is None or len(document_flags) == len(sample_records))
            and (text_before is None or len(text_before) == len(medium_records))
            and (limits_end is None or len(limits_end) == len(medium_records))
            and (exchange_ends is None or len(exchange_ends) == len(sample_records))
            and (exchange_ends is None or len(exchanges) == int(exchange_ends[-1]))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise LoaderError(
            f"{sizes_dir} cannot be read ({error}); write it with `megatron-vl data index`, where every node"
            " can read it"
        ) from error
    if not is_consistent or sample_total != len(sample_records):
        raise LoaderError(
            f"{sizes_dir} is damaged: its files do not fit together; delete it and run `megatron-vl data"
            " index`"
        )
    return StoredSizes(
        sample_records, medium_records, shard_ranges, content_id, shard_facts, *optional_arrays
    )


def _load_array(array_path: Location) -> Any:
    if isinstance(array_path, Path):
        return np.load(array_path, mmap_mode="r", allow_pickle=False)
    return np.load(io.BytesIO(array_path.read_bytes()), allow_pickle=False)


class SampleSizeCounter:
    """Counts tokens and patches of samples from their stored sizes, as the loader does.

    Args:
        chat_encoder: counts the tokens that a medium adds to a text.
        pixel_settings: the settings of the run.
    """

    def __init__(self, chat_encoder: ChatEncoder, pixel_settings: PixelSettings) -> None:
        self.chat_encoder, self.pixel_settings = chat_encoder, pixel_settings
        self._cached_media_sizes: dict[bytes, int] = {}
        """For each stored medium, ``tokens << 32 | patches``."""

    def count_samples(self, stored_sizes: StoredSizes, sample_numbers: Integers) -> tuple[Integers, Integers]:
        """Tokens and patches of samples, int64 [n] each; 0 for a sample that cannot be used.

        Args:
            sample_numbers: int64 [n], numbers in ``stored_sizes.sample_records``.
        """
        token_counts = stored_sizes.sample_records["tokens"][sample_numbers].astype(np.int64)
        media_starts, media_ends = stored_sizes.media_ranges(sample_numbers)
        media_counts = np.where(token_counts > 0, media_ends - media_starts, 0)

        # All media of all samples, one after the other.
        sample_of_medium = np.repeat(np.arange(len(sample_numbers)), media_counts)
        shifts = media_starts - (np.cumsum(media_counts) - media_counts)
        medium_numbers = np.repeat(shifts, media_counts) + np.arange(len(sample_of_medium))
        media_tokens, media_patches = np.divmod(self._count_media(stored_sizes, medium_numbers), 1 << 32)

        # One unusable medium makes its sample unusable, whatever its other media add.
        media_tokens[media_tokens == 0] = -(1 << 40)
        np.add.at(token_counts, sample_of_medium, media_tokens)
        is_usable = token_counts > 0
        patch_counts = np.zeros_like(token_counts)
        np.add.at(patch_counts, sample_of_medium, media_patches)
        return np.where(is_usable, token_counts, 0), np.where(is_usable, patch_counts, 0)

    def cut_sample(
        self, stored_sizes: StoredSizes, sample_number: int, seq_len: int, max_patches: int
    ) -> list[tuple[int, int]]:
        """Tokens and patches of each part of a sample, as the loader cuts it.

        Args:
            sample_number: number of a usable sample in ``stored_sizes.sample_records``.

        Returns:
            Nothing if it cannot be cut (:mod:`megatron_vl.data.sample.parts`).
        """
        media = slice(*(int(bound[0]) for bound in stored_sizes.media_ranges(np.array([sample_number]))))
        is_document = stored_sizes.document_flags is not None and stored_sizes.document_flags[sample_number]
        exchanges = stored_sizes.exchanges_of(sample_number)
        if not is_document and not exchanges:
            return []  # it may have coordinates among its media
        all_limits = stored_sizes.own_limits(np.arange(media.start, media.stop))
        grids = [
            self._medium_grid(limits, *fields)
            for limits, fields in zip(all_limits, stored_sizes.medium_records[media].tolist(), strict=True)
        ]
        patch_counts = [grid.num_patches for grid in grids]
        tokens_before = np.cumsum([0, *map(self.chat_encoder.media_token_count, grids)]).tolist()
        num_tokens = int(stored_sizes.sample_records["tokens"][sample_number]) + tokens_before[-1]
        parts: list[SamplePart]
        if is_document:
            lengths = np.array([self.chat_encoder.document_token_count(grid) for grid in grids], np.int64)
            starts = stored_sizes.text_before[media] + lengths.cumsum() - lengths
            parts = cut_document(
                num_tokens,
                list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True)),
                patch_counts,
                seq_len,
                max_patches,
            )
        else:
            exchanges = [(text + tokens_before[n], n) for text, n in exchanges]
            parts = cut_conversation(num_tokens, exchanges, patch_counts, seq_len, max_patches)
        return [(part.tokens, part.patches) for part in parts]

    def _count_media(self, stored_sizes: StoredSizes, medium_numbers: Integers) -> Integers:
        """``tokens << 32 | patches`` of media, int64 [n]; 0 for a medium that cannot be used."""
        medium_records = stored_sizes.medium_records[medium_numbers]
        if len(self._cached_media_sizes) > MAX_CACHED_MEDIA:
            self._cached_media_sizes.clear()
        media = np.ascontiguousarray(medium_records).view(f"V{MEDIUM_DTYPE.itemsize}").tolist()
        all_limits = stored_sizes.own_limits(medium_numbers)
        keys = [medium + limits for medium, limits in zip(media, all_limits, strict=True)]
        uncached_media = [number for number, key in enumerate(keys) if key not in self._cached_media_sizes]
        for number, fields in zip(uncached_media, medium_records[uncached_media].tolist(), strict=True):
            try:
                media_size = self._count_medium(all_limits[number], *fields)
            except PixelError:
                media_size = 0
            self._cached_media_sizes[keys[number]] = media_size
        return np.fromiter(map(self._cached_media_sizes.__getitem__, keys), np.int64, len(keys))

    def _count_medium(self, limits: bytes, height: int, width: int, frames: int, *fields: Any) -> int:
        if frames != COORDINATE:
            grid = self._medium_grid(limits, height, width, frames, *fields)
            return (self.chat_encoder.media_token_count(grid) << 32) + grid.num_patches
        vision, (number, code) = self.chat_encoder.spec.vision, fields
        sizes = frame_sizes(height, width, self._medium_grid(limits, height, width, 0, 0.0, 0), vision)
        # A token for each digit.
        return len(str(scale_number(number, FRAMES[code // 2], code % 2, sizes, vision.box_frame))) << 32

    def _medium_grid(self, limits_json: bytes, *fields: float) -> GridTHW:
        medium: dict[str, Any] = dict(zip(MEDIUM_DTYPE.names or (), fields, strict=True))
        medium["kind"] = "video" if medium["frames"] else "image"
        medium["limits"] = json.loads(limits_json or "{}")
        medium["sampling"] = "whole" if medium["whole"] else "as a file"
        return stored_media_grid(medium, self.pixel_settings)


MAX_CACHED_MEDIA = 1 << 20
"""Number of different media whose counts are remembered, about 150 bytes each."""
