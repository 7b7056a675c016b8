"""The loader: reads shards written by ``megatron-vl data convert`` with Energon and packs rows.

A loader process first computes tokens, loss mask and grids from the stored sizes, without decoding
(``preencode_sample``). It then decodes pixels and makes one :class:`Row` (``row_of``). Which samples share a
row of training is planned before they are read (:mod:`megatron_vl.data.planned_rows`); rows of validation are
packed in the data set's order. No sample is lost silently: one that cannot be used is logged, counted in
``Row.dropped`` of the next row and listed in its ``Row.dropped_samples``.

If a medium does not decode after packing, its sample stays in the row, grey and without loss, so that all
ranks see the same row. One loader serves a data-parallel replica. (A validation pass ends: samples dropped
after its last row have no row to be counted in and are only logged.)
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.energon import Sample, WorkerConfig
from megatron.energon.errors import FatalSampleError
from megatron.energon.metadataset import load_dataset
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.task_encoder.cooking import basic_sample_keys
from torch import Tensor

from megatron_vl.config import DataConfig, video_rule
from megatron_vl.data.packing import assemble
from megatron_vl.data.packing.fill import fill_row, pack_greedily
from megatron_vl.data.packing.row import Row
from megatron_vl.data.planned_rows import Planning, open_reader
from megatron_vl.data.row_loader import PIXEL_FIELDS, STATE_VERSION, RowLoader
from megatron_vl.data.sample.chat import ChatEncoder, TemplateError
from megatron_vl.data.sample.deadline import UNLIMITED, Deadline, OutOfTimeError
from megatron_vl.data.sample.pixels import (
    PixelSettings,
    VideoInfo,
    image_grid,
    image_planes,
    read_pixel_settings,
    video_grid,
    video_planes,
)
from megatron_vl.data.sample.thinking import ThinkingRule
from megatron_vl.data.source.bad_samples import (
    LIMITS,
    LISTED_PER_ROW,
    NOT_IN_TEMPLATE,
    TEMPLATE_ADVICE,
    TOO_LONG,
    TOO_MANY_PATCHES,
    BadSampleMeter,
    DroppedSample,
)
from megatron_vl.data.source.blend import SOURCE, Source, named, sources_of
from megatron_vl.data.source.description import LoaderError, SplitFacts, read_description
from megatron_vl.data.source.location import location
from megatron_vl.data.source.reading import BROKEN, crc_differs
from megatron_vl.data.source.sizes import text_id
from megatron_vl.data.source.store_reading import ReadAhead
from megatron_vl.data.state import StateError
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW

log = logging.getLogger(__name__)

__all__ = [
    "BadSampleMeter",
    "DroppedSample",
    "LoaderError",
    "RowLoader",
    "StateError",
    "build_loader",
    "pack_greedily",
    "validation_rows",
]

MOST_REFUSED_IN_A_ROW = 1000
"""Number of consecutive unusable samples at which a worker stops instead of searching without end. It is
three times the largest shard if that is more, so that missing shards do not end a run that has others."""
READ_AHEAD, READ_TOGETHER = 256, 16
"""Number of samples of a validation split that are read ahead from an object store, and with one request."""
MOST_LOGGED = 10
"""Number of unusable samples of one reason that a process logs."""
GREY = 128


class UnusableError(Exception):
    """A sample that is left out.

    Args:
        reason: what the sample is counted under.
        detail: what is wrong with it.
        size: its number of tokens or patches, if that is too large.
    """

    def __init__(self, reason: str, detail: str, size: int = 0) -> None:
        super().__init__(detail)
        self.reason, self.size = reason, size


@dataclasses.dataclass(kw_only=True)
class RawSample(Sample):
    """A sample as the shard stores it: its JSON and the bytes of its media, not decoded."""

    text: bytes | None
    members: dict[str, bytes]
    shard: str = ""
    broken: tuple[str, str] | None = None
    """Reason and detail if the sample could not be read."""


@dataclasses.dataclass(kw_only=True)
class EncodedSample(Sample):
    """A tokenized sample with known grids and undecoded media; or a ``refused`` one, which is empty."""

    token_ids: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    loss_mask: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    grids: list[GridTHW] = dataclasses.field(default_factory=list)
    media: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    data: list[bytes] = dataclasses.field(default_factory=list)
    shard: str = ""
    source: str = ""
    refused: tuple[str, str] | None = None
    """Reason and detail if the sample is unusable."""
    refused_size: int = 0
    """Number of tokens or patches if the sample is refused for it."""

    @property
    def size(self) -> tuple[int, int]:
        """Number of tokens and of patches."""
        return len(self.token_ids), sum(grid.patches for grid in self.grids)


@dataclasses.dataclass(kw_only=True)
class DecodedSample(Sample):
    """A sample that is ready for a row."""

    sample: assemble.Sample


def cook(crude: dict[str, Any]) -> RawSample:
    """Turns Energon's crude sample into a :class:`RawSample`.

    It never fails: missing parts are found and counted when encoding.
    """
    members = {name: data for name, data in crude.items() if not name.startswith("__") and name != "json"}
    shard, broken = crude.get("__shard__", ""), crude.get(BROKEN)
    return RawSample(
        **basic_sample_keys(crude), text=crude.get("json"), members=members, shard=shard, broken=broken
    )


class RowEncoder:
    """Turns samples into rows inside a loader process."""

    cook = staticmethod(cook)

    def __init__(self, data: DataConfig, spec: ModelSpec, hf_dir: str | Path) -> None:
        self.data, self.spec = data, spec
        self.chat = ChatEncoder(hf_dir, spec, data.video_prompt, ThinkingRule.of(data))
        self.settings = read_pixel_settings(hf_dir, data)
        self.dropped: Counter[str] = Counter()
        self.dropped_samples: list[DroppedSample] = []
        self.logged: Counter[str] = Counter()
        self.shown: dict[str, set[tuple[str, ...]]] = {}
        """The samples whose message was logged, by reason."""
        self.refused_in_a_row = 0
        self.smallest: dict[str, int] = {}
        """The smallest number of tokens or patches, by reason,
        of the too large samples since the last usable one."""
        self.most_refused = MOST_REFUSED_IN_A_ROW
        self.source_names: tuple[str, ...] = ()
        """Names of the sources of a blend. If there are some, rows say which source each sample is from."""

    def for_process(self) -> RowEncoder:
        """A copy with counts of its own, for one process."""
        own = copy.copy(self)
        own.dropped, own.logged = Counter(), Counter()
        own.dropped_samples, own.smallest, own.shown = [], {}, {}
        return own

    def preencode_sample(self, sample: RawSample) -> EncodedSample:
        size = 0
        try:
            encoded = self._encode(sample)
        except UnusableError as error:
            refused, size = (error.reason, str(error)), error.size
            if size:
                self.smallest[error.reason] = min(size, self.smallest.get(error.reason, size))
        except TemplateError as error:
            refused = (NOT_IN_TEMPLATE, str(error))
        except Exception as error:  # a sample from outside may cause any error
            refused = ("cannot be encoded", f"{type(error).__name__}: {error}")
        else:
            self.refused_in_a_row = 0
            self.smallest.clear()
            return encoded

        self.refused_in_a_row += 1
        self.logged[refused[0]] += 1
        if self.refused_in_a_row >= self.most_refused:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.logged.most_common())
            detail = " ".join(refused[1].split())  # of one line, as the reader of this message expects
            raise FatalSampleError(
                f"{self.refused_in_a_row} samples in a row cannot be used ({reasons}); the last:"
                f" {sample.__key__}: {detail}{self._advice()}"
            )

        self._log(sample, *refused)
        return EncodedSample.derive_from(
            sample, shard=sample.shard, source=_source(sample.text), refused=refused, refused_size=size
        )

    def _encode(self, sample: RawSample) -> EncodedSample:
        if sample.broken:
            raise UnusableError(*sample.broken)
        if sample.text is None:
            raise LoaderError(
                "the sample has no .json member; was the data set written by `megatron-vl data convert`?"
            )
        if crc_differs(sample.text):
            raise UnusableError("text changed since conversion", "the CRC-32 of the sample's JSON differs")

        record = json.loads(sample.text)
        media = record["media"]
        missing = [item["key"] for item in media if item["key"] not in sample.members]
        if missing:
            raise UnusableError("medium missing", f"the shard has no {', '.join(missing)} of the sample")

        grids = [grid_of(item, self.settings) for item in media]
        deadline = Deadline(self.data.sample_timeout_s)
        try:
            token_ids, loss_mask = self.chat.encode(
                record["messages"], grids, record.get("tools", ()), deadline
            )
        except OutOfTimeError as error:
            raise UnusableError("encoding takes too long", str(error)) from error
        encoded = EncodedSample.derive_from(
            sample,
            token_ids=token_ids,
            loss_mask=loss_mask,
            grids=grids,
            media=media,
            data=[sample.members[item["key"]] for item in media],
            shard=sample.shard,
            source=_source(sample.text),
        )
        self._check_size(*encoded.size)
        return encoded

    def _check_size(self, tokens: int, patches: int) -> None:
        if not tokens:
            raise UnusableError("no tokens", "the chat template renders nothing")
        if tokens > self.data.seq_len:
            detail = f"{tokens} tokens do not fit into data.seq_len {self.data.seq_len}"
            raise UnusableError(TOO_LONG, detail, tokens)
        if self.data.max_patches and patches > self.data.max_patches:
            detail = f"{patches} patches do not fit into data.max_patches {self.data.max_patches}"
            raise UnusableError(TOO_MANY_PATCHES, detail, patches)

    def _advice(self) -> str:
        """For samples that were too large: the field to raise, and the value that is needed at least; and
        what to do about those that the chat template cannot write."""
        if NOT_IN_TEMPLATE in self.logged and not self.smallest:
            return f". Note: {TEMPLATE_ADVICE}"
        if not self.smallest:
            return ""

        found = [
            f"the smallest {reason} has {size} {LIMITS[reason][0]}" for reason, size in self.smallest.items()
        ]
        fields = " and ".join(LIMITS[reason][1] for reason in self.smallest)
        return f". Of these, {', '.join(found)}: raise {fields}, or lower data.max_pixels if pictures fill it"

    def _data_set(self, sample: Sample) -> str:
        """The name of a sample's source in a blend; empty without a blend."""
        return self.source_names[(sample.__subflavors__ or {})[SOURCE]] if self.source_names else ""

    def _log(self, sample: RawSample | EncodedSample, reason: str, detail: str) -> None:
        """Logs the first ten samples of a reason, each once, however often the data set is repeated."""
        shown = self.shown.setdefault(reason, set())
        data_set = self._data_set(sample)
        name = (data_set, sample.shard, sample.__key__)
        if len(shown) == MOST_LOGGED or name in shown:
            return
        shown.add(name)
        last = " (further ones are counted, not logged)" if len(shown) == MOST_LOGGED else ""
        whose = f" of {data_set}" if data_set else ""
        log.warning("sample %s%s: %s: %s%s", sample.__key__, whose, reason, detail, last)

    def _drop(self, sample: EncodedSample, reason: str, detail: str) -> None:
        """Counts and lists a sample as dropped; the next row reports it."""
        self.dropped[reason] += 1
        if len(self.dropped_samples) < LISTED_PER_ROW:
            self.dropped_samples.append(
                DroppedSample(
                    sample.__key__,
                    sample.shard,
                    sample.source,
                    self._data_set(sample),
                    reason,
                    detail,
                    sample.refused_size,
                )
            )

    def _usable(self, samples: Sequence[EncodedSample]) -> list[EncodedSample]:
        """The samples that can be used; the others are counted as dropped."""
        for sample in samples:
            if sample.refused:
                self._drop(sample, *sample.refused)
        return [sample for sample in samples if not sample.refused]

    def select_rows(
        self, samples: list[EncodedSample], last: bool
    ) -> tuple[list[list[EncodedSample]], list[EncodedSample]]:
        """From samples in order: the rows to make now, and the samples that wait.

        Args:
            last: whether no samples follow. None wait then.
        """
        usable = self._usable(samples)
        sizes = [sample.size for sample in usable]
        if not self.data.pack:
            return [[sample] for sample in usable], []
        if last or not usable:
            bins = pack_greedily(sizes, self.data.seq_len, self.data.max_patches)
            return [[usable[i] for i in bin_] for bin_ in bins], []

        row = fill_row(sizes, self.data.seq_len, self.data.max_patches)
        taken = set(row)
        return [[usable[i] for i in row]], [sample for i, sample in enumerate(usable) if i not in taken]

    def postencode_sample(self, sample: EncodedSample) -> DecodedSample:
        """The sample with its media decoded. It must not be refused."""
        problem: tuple[str, str] | None = None
        items = []
        deadline = Deadline(self.data.sample_timeout_s)
        for grid, item, data in zip(sample.grids, sample.media, sample.data, strict=True):
            try:
                planes = self._planes(item, data, grid, deadline)
            except UnusableError as error:
                problem = problem or (error.reason, str(error))
                shape = (1, grid.h * grid.w, 3 * self.settings.patch_size**2)
                planes = torch.full(shape, GREY, dtype=torch.uint8)
            items.append(assemble.MediaItem(grid, planes))

        loss_mask = sample.loss_mask
        if problem:
            loss_mask = torch.zeros_like(loss_mask)
            self._drop(sample, *problem)
            self.logged[problem[0]] += 1
            self._log(sample, *problem)
        return DecodedSample.derive_from(sample, sample=assemble.Sample(sample.token_ids, loss_mask, items))

    def _planes(self, item: dict[str, Any], data: bytes, grid: GridTHW, deadline: Deadline) -> Tensor:
        name = f"{item['kind']} {item['key']}"
        if "crc32" in item and item["crc32"] != zlib.crc32(data):
            raise UnusableError(f"{item['kind']} changed since conversion", f"the CRC-32 of {name} differs")
        try:
            deadline.check()
            return planes_of(item, data, grid, self.settings, deadline)
        except OutOfTimeError as error:
            raise UnusableError("decoding takes too long", f"{name}: {error}") from error
        except Exception as error:  # decoders raise all kinds of errors on invalid bytes
            raise UnusableError(f"{item['kind']} does not decode", f"{name}: {error}") from error

    def row_of(self, samples: Sequence[EncodedSample], source: int = 0) -> Row:
        """Decodes samples and packs them into a row; one of padding if none of them can be used.

        Args:
            source: number of the source in the blend for which a row of padding counts.
        """
        used = [self.postencode_sample(sample) for sample in self._usable(samples)]
        if not used:
            return self.empty_row(source)

        rule = self.data.video_positions
        row = assemble.pack_row(
            [s.sample for s in used], self.spec, self.data.seq_len, self.chat.pad_token_id, rule
        )
        row.keys = [s.__key__ for s in used]
        if self.source_names:
            row.sources = [(s.__subflavors__ or {})[SOURCE] for s in used]
        return self._reporting(row)

    def empty_row(self, source: int = 0) -> Row:
        """A row of padding without loss, in place of one of which no sample can be used.

        It counts one sample of one token, so that nothing divides by zero.

        Args:
            source: number of the source in the blend for which it counts.
        """
        pad = assemble.pad_token(self.spec) if self.chat.pad_token_id is None else self.chat.pad_token_id
        nothing = assemble.Sample(torch.tensor([pad]), torch.zeros(1, dtype=torch.bool))
        row = assemble.pack_row([nothing], self.spec, self.data.seq_len, pad)
        row.sources = [source] if self.source_names else []
        return self._reporting(row)

    def _reporting(self, row: Row) -> Row:
        """The row with the samples that were dropped since the last one."""
        row.dropped = dict(self.dropped)
        row.dropped_samples = self.dropped_samples
        self.dropped = Counter()
        self.dropped_samples = []
        return row


def _source(text: bytes | None) -> str:
    """The input file and record that a stored sample was converted from; empty if it does not name them."""
    try:
        source = json.loads(text or b"")["source"]
        return f"{source['file']} record {source['record']}"
    except Exception:  # a damaged shard may hold any text
        return ""


def grid_of(item: dict[str, Any], settings: PixelSettings) -> GridTHW:
    """The grid of a stored medium, from its stored size."""
    if item["kind"] == "image":
        return image_grid(item["height"], item["width"], settings)
    return video_grid(stored_video(item), settings)


def stored_video(item: dict[str, Any]) -> VideoInfo:
    """The facts of a stored video. Raises KeyError if one is missing."""
    sampling = item.get("sampling", "as a file")
    return VideoInfo(item["frames"], item["fps"], item["height"], item["width"], sampling)


def planes_of(
    item: dict[str, Any],
    data: bytes,
    grid: GridTHW,
    settings: PixelSettings,
    deadline: Deadline = UNLIMITED,
) -> Tensor:
    """Decodes a stored medium. A picture larger than its stored size is refused.

    Raises:
        PixelError: the medium does not decode.
        OutOfTimeError: the deadline has passed while a video was decoded.
    """
    if item["kind"] == "image":
        return image_planes(data, grid, settings, item["height"] * item["width"])
    return video_planes(data, stored_video(item), grid, settings, deadline)


# --- The loader


def build_loader(
    data: DataConfig,
    spec: ModelSpec,
    hf_dir: str | Path,
    *,
    dp_rank: int = 0,
    dp_size: int = 1,
    facts: SplitFacts | None = None,
    rows_per_step: int = 0,
) -> RowLoader:
    """The loader of data-parallel rank ``dp_rank``: rows of the split ``train``, without end.

    Args:
        data: the data set, and how rows are made from it.
        hf_dir: folder of the tokenizer, chat template and image processor.
        facts: facts of the split if another rank has read and checked the description; None: read it here.
        rows_per_step: rows of all ranks between two saves, a multiple of ``dp_size``; 0: one of each rank.

    Raises:
        LoaderError: the folder is not a data set, or the split or a drawn source of it is empty.
        SizesError: a data set has no sizes for this tokenizer and chat template.
        DescriptionError: the data set's description could run code or leads out of its folder.
        PixelError, ChatError, FileNotFoundError: as their readers raise them.
    """
    facts = facts or read_description(location(data.path)).facts("train")
    # Workers are forked, which the tokenizer's own threads would not survive.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    encoder = _encoder(data, spec, hf_dir, facts)
    blend, datasets = _data_sets(data, facts, "train")
    if empty := [source.name for source in blend if source.share and not source.samples]:
        raise LoaderError(f"{data.path}: {named(empty)} has no samples; widen its subset, or leave it out")
    if len(blend) > 1:
        encoder.source_names = tuple(source.name for source in blend)

    identity = {
        "version": STATE_VERSION,
        "dataset": facts.identity,
        "seed": data.seed,
        "seq_len": data.seq_len,
        "shuffle": data.shuffle,
        **({"shuffle_block": data.shuffle_block} if data.shuffle else {}),
        "pack": data.pack,
        **({"packing_buffer": data.packing_buffer} if data.pack else {}),
        "max_patches": data.max_patches,
        # These determine the lengths of samples, and so the rows.
        "pixels": [getattr(encoder.settings, name) for name in PIXEL_FIELDS],
        "chat_template": zlib.crc32(encoder.chat.template.encode()),
        **video_rule(data, spec.vision.video_timestamps),
        **(dataclasses.asdict(encoder.chat.thinking) if encoder.chat.writes_thinking else {}),
    }
    planning = Planning(datasets, blend, text_id(hf_dir, spec, data), encoder, rows_per_step or dp_size)
    return RowLoader(planning, identity, facts, dp_rank, dp_size, data)


def validation_rows(
    data: DataConfig,
    spec: ModelSpec,
    hf_dir: str | Path,
    split: str = "val",
    facts: SplitFacts | None = None,
) -> Iterator[Row]:
    """The rows of one pass through a split, in its order. They are packed as samples are read, so that no
    sizes are needed.

    Args:
        facts: as for :func:`build_loader`.

    Raises:
        As :func:`build_loader`.
    """
    facts = facts or read_description(location(data.path)).facts(split)
    encoder = _encoder(data, spec, hf_dir, facts)
    choices = data.packing_buffer if data.pack else 1

    waiting: list[EncodedSample] = []
    for sample in _in_order(encoder, *_data_sets(data, facts, split)):
        waiting.append(sample)
        if len(waiting) == choices:
            rows, waiting = encoder.select_rows(waiting, last=False)
            yield from map(encoder.row_of, rows)
    rows, _ = encoder.select_rows(waiting, last=True)
    yield from map(encoder.row_of, rows)


def _in_order(
    encoder: RowEncoder, blend: Sequence[Source], datasets: Sequence[LoadedDataset]
) -> Iterator[EncodedSample]:
    """All samples of all sources, one after the other."""
    for source, loaded in zip(blend, datasets, strict=True):
        ahead = ReadAhead([loaded.dataset], READ_TOGETHER, blocks=1, ranks=1)
        reader = open_reader(loaded.dataset, encoder.data.sample_timeout_s, partial(ahead.take, 0))
        end = source.first + source.samples
        for index in range(source.first, end):
            if (index - source.first) % READ_AHEAD == 0:
                ahead.expect((0, each) for each in range(index, min(index + READ_AHEAD, end)))
            crude = reader[index]
            if crude is not None:  # the data set's description excludes it
                yield encoder.preencode_sample(encoder.cook(crude))


def _encoder(data: DataConfig, spec: ModelSpec, hf_dir: str | Path, facts: SplitFacts) -> RowEncoder:
    encoder = RowEncoder(data, spec, hf_dir)
    encoder.most_refused = max(MOST_REFUSED_IN_A_ROW, 3 * facts.largest_shard)
    _check_patches(encoder.settings, spec, hf_dir)
    return encoder


def _data_sets(
    data: DataConfig, facts: SplitFacts, split: str
) -> tuple[tuple[Source, ...], list[LoadedDataset]]:
    """The sources of a split, and Energon's data sets that they are."""
    blend = sources_of(facts.identity, location(data.path).name)
    alone = WorkerConfig(rank=0, world_size=1, num_workers=0)
    loaded = load_dataset(data.path).get_datasets(
        training=False, split_part=split, worker_config=alone, decoder=None
    )
    if [len(one.dataset) for one in loaded.datasets] != [source.length for source in blend]:
        raise RuntimeError(f"Energon reads other data sets than {[source.name for source in blend]}")
    return blend, loaded.datasets


def _check_patches(settings: PixelSettings, spec: ModelSpec, hf_dir: str | Path) -> None:
    vision = spec.vision
    ours = (settings.patch_size, settings.merge_size, settings.temporal_patch_size)
    model = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    if ours != model:
        raise LoaderError(
            f"{hf_dir}: patch, merge and temporal patch size are {ours} in the image processor, {model} in"
            " config.json"
        )
