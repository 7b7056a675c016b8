"""Energon loader: shards written by ``megatron-vl data convert`` -> packed rows.

Order of work in a worker: tokens, loss mask and grids from the stored sizes, without decoding (``preencode_sample``); packing
on two budgets (``select_samples_to_pack``); pixels only then (``postencode_sample``); one :class:`Row`
(``pack_selected_samples``). Nothing vanishes: what cannot be used is logged and counted in ``Row.dropped`` of the next row.

A medium that fails to decode after packing leaves its sample in the row, grey and without loss, so that all ranks see
the same row. One loader serves a data-parallel replica.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from megatron.energon.errors import FatalSampleError, reraise_exception
from megatron.energon.task_encoder.cooking import basic_sample_keys
from torch import Tensor

from ..config import DataConfig
from ..models.families import ModelSpec
from ..models.rope import Grid
from . import assemble
from .chat import ChatEncoder
from .pixels import PixelError, PixelSettings, VideoInfo, image_grid, image_planes, read_pixel_settings, video_grid, video_planes
from .row import Row
from .state import StateError, from_json, to_json

log = logging.getLogger(__name__)

MOST_REFUSED_IN_A_ROW = 1000
"""Unusable samples one after the other at which a worker stops, instead of searching for ever."""
GREY = 128


class LoaderError(ValueError):
    """A data set or a setting that cannot be loaded; the message says what to change."""


@dataclasses.dataclass(kw_only=True)
class RawSample(Sample):
    """A sample as it is in the shard: its JSON and the bytes of its media, nothing decoded."""

    text: bytes | None
    members: dict[str, bytes]


@dataclasses.dataclass(kw_only=True)
class EncodedSample(Sample):
    """Tokenized, grids known, pixels still in their files."""

    token_ids: Tensor
    loss_mask: Tensor
    grids: list[Grid]
    media: list[dict[str, Any]]
    data: list[bytes]

    @property
    def patches(self) -> int:
        return sum(grid.patches for grid in self.grids)


@dataclasses.dataclass(kw_only=True)
class DecodedSample(Sample):
    """Ready for a row."""

    sample: assemble.Sample


@stateless
def cook(crude: dict[str, Any]) -> RawSample:
    """Energon's crude sample -> :class:`RawSample`. Never fails: what is missing is counted when encoding."""
    members = {name: data for name, data in crude.items() if not name.startswith("__") and name != "json"}
    return RawSample(**basic_sample_keys(crude), text=crude.get("json"), members=members)


class RowEncoder(DefaultTaskEncoder):
    """Turns samples into rows inside a loader worker."""

    cookers = [Cooker(cook)]
    decoder = None  # raw bytes: Energon's decoder would decode every picture before packing

    def __init__(self, data: DataConfig, spec: ModelSpec, hf_dir: str | Path) -> None:
        super().__init__()
        self.data, self.spec = data, spec
        self.chat = ChatEncoder(hf_dir, spec)
        self.settings = read_pixel_settings(hf_dir, data)
        self.dropped: Counter[str] = Counter()
        self.logged: Counter[str] = Counter()
        self.refused_in_a_row = 0

    @stateless
    def preencode_sample(self, sample: RawSample) -> EncodedSample:
        try:
            encoded = self._encode(sample)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._refuse(sample, "cannot be encoded", f"{type(error).__name__}: {error}")
        tokens, patches = len(encoded.token_ids), encoded.patches
        if tokens > self.data.seq_len:
            self._refuse(sample, "longer than seq_len", f"{tokens} tokens do not fit into data.seq_len {self.data.seq_len}")
        if self.data.max_patches and patches > self.data.max_patches:
            self._refuse(
                sample, "more than max_patches", f"{patches} patches do not fit into data.max_patches {self.data.max_patches}"
            )
        self.refused_in_a_row = 0
        return encoded

    def _encode(self, sample: RawSample) -> EncodedSample:
        if sample.text is None:
            raise LoaderError("the sample has no .json member; was the data set written by `megatron-vl data convert`?")
        record = json.loads(sample.text)
        media = record["media"]
        grids = [grid_of(item, self.settings) for item in media]
        token_ids, loss_mask = self.chat.encode(record["messages"], grids)
        data = [sample.members[item["key"]] for item in media]
        return EncodedSample.derive_from(sample, token_ids=token_ids, loss_mask=loss_mask, grids=grids, media=media, data=data)

    def _refuse(self, sample: Sample, reason: str, detail: str) -> None:
        """Counts and logs a sample that is left out. Always raises."""
        self._count(sample, reason, detail)
        self.refused_in_a_row += 1
        if self.refused_in_a_row >= MOST_REFUSED_IN_A_ROW:
            raise FatalSampleError(f"{self.refused_in_a_row} samples in a row cannot be used; the last: {detail}")
        raise SkipSample

    def _count(self, sample: Sample, reason: str, detail: str) -> None:
        self.dropped[reason] += 1
        self.logged[reason] += 1
        if self.logged[reason] <= 10:
            last = " (further ones are counted, not logged)" if self.logged[reason] == 10 else ""
            log.warning("sample %s: %s: %s%s", sample.__key__, reason, detail, last)

    def select_samples_to_pack(self, samples: list[EncodedSample]) -> list[list[EncodedSample]]:
        if not self.data.pack:
            return [[sample] for sample in samples]
        sizes = [(len(sample.token_ids), sample.patches) for sample in samples]
        return [[samples[i] for i in bin_] for bin_ in pack_greedily(sizes, self.data.seq_len, self.data.max_patches)]

    @stateless
    def postencode_sample(self, sample: EncodedSample) -> DecodedSample:
        loss_mask = sample.loss_mask
        items = []
        for grid, item, data in zip(sample.grids, sample.media, sample.data, strict=True):
            try:
                planes = planes_of(item, data, grid, self.settings)
            except PixelError as error:
                self._count(sample, f"{item['kind']} does not decode", str(error))
                shape = (1, grid.h * grid.w, 3 * self.settings.patch_size**2)
                planes, loss_mask = torch.full(shape, GREY, dtype=torch.uint8), torch.zeros_like(loss_mask)
            items.append(assemble.MediaItem(grid, planes))
        return DecodedSample.derive_from(sample, sample=assemble.Sample(sample.token_ids, loss_mask, items))

    @stateless
    def pack_selected_samples(self, samples: list[DecodedSample]) -> Row:
        row = assemble.pack_row([s.sample for s in samples], self.spec, self.data.seq_len, self.chat.pad_token_id)
        row.keys = [s.__key__ for s in samples]
        row.dropped, self.dropped = dict(self.dropped), Counter()
        return row


def grid_of(item: dict[str, Any], settings: PixelSettings) -> Grid:
    """The grid of a stored medium from its stored size."""
    if item["kind"] == "image":
        return image_grid(item["height"], item["width"], settings)
    return video_grid(VideoInfo(item["frames"], item["fps"], item["height"], item["width"]), settings)


def planes_of(item: dict[str, Any], data: bytes, grid: Grid, settings: PixelSettings) -> Tensor:
    """Decodes a stored medium. Raises :class:`PixelError`."""
    if item["kind"] == "image":
        return image_planes(data, grid, settings)
    return video_planes(data, VideoInfo(item["frames"], item["fps"], item["height"], item["width"]), grid, settings)


def pack_greedily(sizes: list[tuple[int, int]], tokens: int, patches: int = 0) -> list[list[int]]:
    """First-fit decreasing on two budgets: indices of the samples of each row.

    Args:
        sizes: (tokens, patches) of each sample; none may exceed a budget.
        tokens: budget of a row. patches: budget of a row; 0: none.

    Returns:
        Rows in the order of their earliest sample, samples in their order: packing shuffles as little as it can.
    """
    rows: list[list[int]] = []
    free: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i][0], i)):
        need, pixels = sizes[i][0], sizes[i][1] if patches else 0
        place = next((r for r, (t, p) in enumerate(free) if need <= t and pixels <= p), None)
        if place is None:
            place = len(rows)
            rows.append([])
            free.append([tokens, patches])
        rows[place].append(i)
        free[place][0] -= need
        free[place][1] -= pixels
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])


# ---------------------------------------------------------------------------------------------------- the loader


class RowLoader:
    """Iterator of rows of one data-parallel replica. Training repeats for ever, validation ends after one pass."""

    def __init__(self, loader: Any, identity: dict[str, Any]) -> None:
        self._loader, self._identity = loader, identity
        self._rows: Iterator[Row] | None = None

    def __iter__(self) -> RowLoader:
        return self

    def __next__(self) -> Row:
        if self._loader is None:
            raise LoaderError("the loader is closed")
        if self._rows is None:
            self._rows = iter(self._loader)
        return next(self._rows)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as JSON values; the next row after :meth:`load_state_dict` is the next row here."""
        return {"identity": self._identity, "energon": to_json(self._loader.save_state_rank())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was saved; before the first row is read.

        Raises:
            StateError: the state is of another data set, rank, number of ranks or workers, or of other packing (Energon
                would restore some of these without a word, and wrong), or rows were read already.
        """
        if self._rows is not None:
            raise StateError("a loader state must be loaded before the first row is read")
        saved = state.get("identity", {})
        for name, value in self._identity.items():
            if saved.get(name) != value:
                raise StateError(f"the loader state was saved with {name} = {saved.get(name)!r}, this loader has {value!r}")
        energon = from_json(state["energon"])
        self._loader.restore_state_rank(energon)
        if energon is not None and self._identity["num_workers"]:
            # Energon 7.4.1 ignores the offset here: a worker that has not spoken since would be rewound by the next save.
            counters = [(w.state.sample_index + w.offset - 1) if w.state is not None else -1 for w in energon.worker_states]
            self._loader._worker_sample_counters = counters

    def close(self) -> None:
        """Ends the worker processes. The loader cannot be used afterwards."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        self._rows = self._loader = None


def build_loader(
    data: DataConfig, spec: ModelSpec, hf_dir: str | Path, *, dp_rank: int = 0, dp_size: int = 1, split: str = "train"
) -> RowLoader:
    """The loader of data-parallel rank ``dp_rank``.

    Args:
        data: the data set and how rows are made. hf_dir: tokenizer, chat template and image processor are read from it.
        split: ``train`` (shuffled, endless) or ``val`` (in order, once).

    Raises:
        LoaderError: the folder is no data set, the split is empty, or has fewer samples than ranks x workers.
        PixelError, ChatError, FileNotFoundError: as their readers raise them.
    """
    samples, digest = _split_size(Path(data.path), split)
    workers = max(data.num_workers, 1)
    if samples is not None and samples < dp_size * workers:
        raise LoaderError(
            f"{data.path}: {samples} samples in {split}, but {dp_size} data-parallel ranks x {workers} workers need at least "
            f"{dp_size * workers}; lower data.num_workers or the number of ranks, or add samples"
        )
    # Workers fork; the tokenizer's own threads would not survive it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    encoder = RowEncoder(data, spec, hf_dir)
    _check_patches(encoder.settings, spec, hf_dir)
    config = WorkerConfig(
        rank=dp_rank,
        world_size=dp_size,
        num_workers=data.num_workers,
        seed_offset=data.seed,
        # An error that is not one of ours ends the run; Energon's default prints it and goes on.
        global_error_handler=reraise_exception,
    )
    dataset = _dataset(data, encoder, config, split)
    # A state after every row: a save then needs no rows to be read again.
    loader = get_savable_loader(
        dataset,
        checkpoint_every_sec=0,
        checkpoint_every_min_n_samples=1,
        n_checkpoints=4 * workers + 4,
        watchdog_timeout_seconds=None,
    )
    loader.pin_memory = False  # rows are pinned where they are sent from; Energon leaves no other way to say so
    identity = {
        "dataset": digest,
        "split": split,
        "dp_rank": dp_rank,
        "dp_size": dp_size,
        "num_workers": data.num_workers,
        "seed": data.seed,
        "seq_len": data.seq_len,
        "pack": data.pack,
        "packing_buffer": data.packing_buffer,
        "shuffle_buffer": data.shuffle_buffer,
    }
    return RowLoader(loader, identity)


def _dataset(data: DataConfig, encoder: RowEncoder, config: WorkerConfig, split: str) -> Any:
    buffer = data.packing_buffer if data.pack else 1
    common: dict[str, Any] = {"worker_config": config, "task_encoder": encoder, "batch_size": None, "packing_buffer_size": buffer}
    if split != "train":
        return get_val_dataset(data.path, split_part=split, **common)
    if data.shuffle_buffer > 0:
        order: dict[str, int | None] = {
            "shuffle_buffer_size": data.shuffle_buffer,
            "shuffle_over_epochs_multiplier": 1,
            "max_samples_per_sequence": 100,
        }
    else:  # Energon reads 16 places of a data set in turn unless told otherwise
        order = {"shuffle_buffer_size": None, "shuffle_over_epochs_multiplier": None, "max_samples_per_sequence": None}
        order["parallel_shard_iters"] = 1
    return get_train_dataset(data.path, split_part=split, **order, **common)


def _split_size(path: Path, split: str) -> tuple[int | None, str]:
    """Samples of a split (None for a metadataset, whose parts are elsewhere) and what identifies the data set."""
    if path.is_file():
        return None, path.name
    meta = path / ".nv-meta"
    if not (meta / "split.yaml").is_file():
        raise LoaderError(f"data.path {path} is no data set; give a folder written by `megatron-vl data convert`")
    shards = (yaml.safe_load((meta / "split.yaml").read_text()).get("split_parts") or {}).get(split) or []
    uuid = meta / "index.uuid"
    digest = uuid.read_text().strip() if uuid.is_file() else path.name
    if not shards:
        raise LoaderError(f"{path}: the split {split!r} is empty; convert with --val-fraction, or with more samples")
    counts = json.loads((meta / ".info.json").read_text())["shard_counts"]
    if not all(name in counts for name in shards):  # brace patterns of a data set prepared by hand
        return None, digest
    return sum(counts[name] for name in shards), digest


def _check_patches(settings: PixelSettings, spec: ModelSpec, hf_dir: str | Path) -> None:
    vision = spec.vision
    ours = (settings.patch_size, settings.merge_size, settings.temporal_patch_size)
    model = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    if ours != model:
        raise LoaderError(
            f"{hf_dir}: patch, merge and temporal patch size are {ours} in the image processor, {model} in config.json"
        )
