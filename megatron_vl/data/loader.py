"""The loader: reads shards written by ``megatron-vl data convert`` with Energon and packs rows.

A loader process first computes tokens, loss mask and grids from the stored sizes, without decoding
(``preencode_sample``). It then decodes pixels and makes one
:class:`~megatron_vl.data.packing.training_row.TrainingRow` (``make_row``). Which samples share a row of
training is planned before they are read (:mod:`megatron_vl.data.planned_rows`). Rows of validation are packed
in the data set's order. No sample is lost silently: one that cannot be used is logged, counted in
``dropped_counts`` of the next row and listed in its ``dropped_samples``.

If a medium does not decode after packing, its sample stays in the row, grey and without loss, so that all
ranks see the same row. One loader serves a data-parallel replica. A validation pass ends, so samples that are
dropped after its last row are only logged: no later row could count them.
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
from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.errors import FatalSampleError
from megatron.energon.metadataset import load_dataset
from megatron.energon.metadataset.loader_interface import LoadedDataset
from torch import Tensor

from megatron_vl.config import DataConfig
from megatron_vl.data import planned_rows
from megatron_vl.data.packing import assemble_row
from megatron_vl.data.packing.fill_row import choose_row_samples, pack_first_fit
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.planned_rows import JoinedDataset, PlanningContext, open_sample_reader
from megatron_vl.data.row_loader import PIXEL_FIELDS, PROCESSOR_PREFIX, STATE_VERSION, RowLoader
from megatron_vl.data.sample.chat import ChatEncoder, ChatTemplateError
from megatron_vl.data.sample.deadline import NO_DEADLINE, SAMPLE_TIMEOUT_S, SampleDeadline, SampleTimeoutError
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
    MAX_LISTED_PER_ROW,
    NOT_IN_CHAT_TEMPLATE,
    TOO_LONG,
    TOO_MANY_PATCHES,
    BadSampleMeter,
    DroppedSample,
)
from megatron_vl.data.source.blend import BlendSource, list_names, read_blend_sources
from megatron_vl.data.source.dataset_description import LoaderError, SplitFacts, read_description
from megatron_vl.data.source.location import part_folders, resolve_location
from megatron_vl.data.source.sample_sizes import compute_tokenization_id
from megatron_vl.data.source.store_reading import ReadAhead
from megatron_vl.data.source.tolerant_reader import BROKEN_FIELD, is_crc32_wrong
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW
from megatron_vl.system.errors import is_machine_fault

log = logging.getLogger(__name__)

MAX_CONSECUTIVE_REFUSALS = 1000
"""Number of consecutive unusable samples at which a worker stops, so that it does not search forever. It is
three times the largest shard if that is more, so that missing shards do not end a run that has others."""
READ_AHEAD = 256
"""Number of samples of a validation split that are read ahead from an object store."""
READ_TOGETHER = 16
"""Number of samples of a validation split that are read with one request."""
MAX_LOGGED_PER_REASON = 10
"""Number of unusable samples of one reason that a process logs."""
GREY_VALUE = 128
"""Value of all pixels that stand for a medium that does not decode."""


class UnusableSampleError(Exception):
    """A sample that is left out.

    Args:
        reason: the name under which such samples are counted.
        detail: says what is wrong with this sample.
        sample_size: the sample's number of tokens or patches if that is too large, otherwise 0.
    """

    def __init__(self, reason: str, detail: str, sample_size: int = 0) -> None:
        super().__init__(detail)
        self.reason, self.sample_size = reason, sample_size


def refusal_of_error(error: Exception) -> UnusableSampleError:
    """The reason for which a sample is left out whose encoding raised ``error``."""
    if isinstance(error, UnusableSampleError):
        return error
    if isinstance(error, ChatTemplateError):
        return UnusableSampleError(NOT_IN_CHAT_TEMPLATE, str(error))
    if isinstance(error, SampleTimeoutError):
        return UnusableSampleError("encoding takes too long", str(error))
    return UnusableSampleError("cannot be encoded", f"{type(error).__name__}: {error}")


@dataclasses.dataclass
class RawSample:
    """A sample as the shard stores it: its JSON and the bytes of its media, not decoded."""

    key: str
    json_bytes: bytes | None
    media_bytes: dict[str, bytes]
    shard_name: str = ""
    source_index: int = 0
    """Number of the sample's source in the blend."""
    read_failure: tuple[str, str] | None = None
    """Reason and detail if the sample could not be read."""


@dataclasses.dataclass
class EncodedSample:
    """A tokenized sample with known grids and undecoded media. A ``refused`` sample is empty."""

    key: str
    shard_name: str = ""
    source: str = ""
    """The input file and record that it was converted from."""
    source_index: int = 0
    token_ids: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    loss_mask: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    grids: list[GridTHW] = dataclasses.field(default_factory=list)
    media: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    data: list[bytes] = dataclasses.field(default_factory=list)
    refused: tuple[str, str] | None = None
    """Reason and detail if the sample is unusable."""
    refused_size: int = 0
    """The number of tokens or patches for which the sample is refused; 0 for another reason."""

    @property
    def token_and_patch_count(self) -> tuple[int, int]:
        """Number of tokens and of patches."""
        return len(self.token_ids), sum(grid.num_patches for grid in self.grids)


def cook_sample(crude_sample: dict[str, Any], source_index: int = 0) -> RawSample:
    """Turns Energon's crude sample of a source into a :class:`RawSample`.

    It never fails: missing parts are found and counted when encoding.
    """
    media_bytes = {}
    for name, data in crude_sample.items():
        if not name.startswith("__") and name != "json":
            media_bytes[name] = data
    return RawSample(
        crude_sample["__key__"],
        crude_sample.get("json"),
        media_bytes,
        crude_sample.get("__shard__", ""),
        source_index,
        crude_sample.get(BROKEN_FIELD),
    )


class RowEncoder:
    """Turns samples into rows inside a loader process."""

    cook = staticmethod(cook_sample)

    def __init__(self, data_config: DataConfig, spec: ModelSpec, hf_dir: str | Path) -> None:
        self.data_config, self.spec = data_config, spec
        self.chat_encoder = ChatEncoder(hf_dir, spec, ThinkingRule.from_data_config(data_config))
        self.pixel_settings = read_pixel_settings(hf_dir, data_config)
        self.dropped_counts: Counter[str] = Counter()
        self.dropped_samples: list[DroppedSample] = []
        self.refusal_meter = BadSampleMeter(1.0)
        """Counts the unusable samples, for the message if too many come one after the other."""
        self.logged_samples: dict[str, set[tuple[str, ...]]] = {}
        """The samples whose message was logged, by reason."""
        self.consecutive_refusals = 0
        self.max_consecutive_refusals = MAX_CONSECUTIVE_REFUSALS
        self.source_names: tuple[str, ...] = ()
        """Names of the sources of a blend. If it is not empty, rows say which source each sample is from."""

    def copy_for_process(self) -> RowEncoder:
        """A copy with separate counts, for one process."""
        process_encoder = copy.copy(self)
        process_encoder.dropped_counts = Counter()
        process_encoder.refusal_meter = BadSampleMeter(1.0)
        process_encoder.dropped_samples = []
        process_encoder.logged_samples = {}
        return process_encoder

    def preencode_sample(self, raw_sample: RawSample) -> EncodedSample:
        """Tokenizes a sample without decoding its media. An unusable sample comes back ``refused``.

        Raises:
            LoaderError: the data set was not written by this toolkit.
            FatalSampleError: too many consecutive samples are unusable.
        """
        try:
            encoded_sample = self._encode_sample(raw_sample)
        except Exception as error:  # a sample from outside may cause any error
            if is_machine_fault(error):
                raise
            refusal = refusal_of_error(error)
        else:
            self.consecutive_refusals = 0
            return encoded_sample

        self._count_refusal(raw_sample, refusal)
        self._log_bad_sample(raw_sample, refusal.reason, str(refusal))
        return EncodedSample(
            raw_sample.key,
            raw_sample.shard_name,
            _source_text(raw_sample.json_bytes),
            raw_sample.source_index,
            refused=(refusal.reason, str(refusal)),
            refused_size=refusal.sample_size,
        )

    def _count_refusal(self, raw_sample: RawSample, refusal: UnusableSampleError) -> None:
        """Counts an unusable sample. Raises FatalSampleError if too many came one after the other."""
        self.consecutive_refusals += 1
        refusal_details = {"size": refusal.sample_size, "data_sets": []}
        self.refusal_meter.add_counts(0, {refusal.reason: 1}, {refusal.reason: refusal_details})
        if self.consecutive_refusals >= self.max_consecutive_refusals:
            refusal_detail = " ".join(str(refusal).split())  # in one line, as the message's reader expects
            raise FatalSampleError(
                f"{self.consecutive_refusals} samples in a row cannot be used"
                f" ({self.refusal_meter.counts_by_reason()}); the last: {raw_sample.key}:"
                f" {refusal_detail}. {self.refusal_meter.advice_text()}"
            )

    def _encode_sample(self, raw_sample: RawSample) -> EncodedSample:
        json_bytes = checked_json_bytes(raw_sample)
        conversation_record = json.loads(json_bytes)
        media_records = conversation_record["media"]
        missing_keys = [item["key"] for item in media_records if item["key"] not in raw_sample.media_bytes]
        if missing_keys:
            raise UnusableSampleError(
                "medium missing", f"the shard has no {', '.join(missing_keys)} of the sample"
            )

        media_grids = [stored_media_grid(item, self.pixel_settings) for item in media_records]
        deadline = SampleDeadline(SAMPLE_TIMEOUT_S)
        token_ids, loss_mask = self.chat_encoder.encode(
            conversation_record["messages"], media_grids, conversation_record.get("tools", ()), deadline
        )
        encoded_sample = EncodedSample(
            raw_sample.key,
            raw_sample.shard_name,
            _source_text(conversation_record),
            raw_sample.source_index,
            token_ids=token_ids,
            loss_mask=loss_mask,
            grids=media_grids,
            media=media_records,
            data=[raw_sample.media_bytes[item["key"]] for item in media_records],
        )
        self._check_size(*encoded_sample.token_and_patch_count)
        return encoded_sample

    def _check_size(self, token_count: int, patch_count: int) -> None:
        if not token_count:
            raise UnusableSampleError("no tokens", "the chat template renders nothing")
        if token_count > self.data_config.seq_len:
            problem_text = f"{token_count} tokens do not fit into data.seq_len {self.data_config.seq_len}"
            raise UnusableSampleError(TOO_LONG, problem_text, token_count)
        if self.data_config.max_patches and patch_count > self.data_config.max_patches:
            problem_text = (
                f"{patch_count} patches do not fit into data.max_patches {self.data_config.max_patches}"
            )
            raise UnusableSampleError(TOO_MANY_PATCHES, problem_text, patch_count)

    def _dataset_name(self, sample: RawSample | EncodedSample) -> str:
        """The name of a sample's source in a blend; empty without a blend."""
        return self.source_names[sample.source_index] if self.source_names else ""

    def _log_bad_sample(self, sample: RawSample | EncodedSample, reason: str, detail: str) -> None:
        """Logs the first ten samples of a reason, each once, however often the data set is repeated."""
        shown_samples = self.logged_samples.setdefault(reason, set())
        dataset_name = self._dataset_name(sample)
        name = (dataset_name, sample.shard_name, sample.key)
        if len(shown_samples) == MAX_LOGGED_PER_REASON or name in shown_samples:
            return
        shown_samples.add(name)
        last_note = (
            " (further ones are counted, not logged)" if len(shown_samples) == MAX_LOGGED_PER_REASON else ""
        )
        dataset_note = f" of {dataset_name}" if dataset_name else ""
        log.warning("sample %s%s: %s: %s%s", sample.key, dataset_note, reason, detail, last_note)

    def _record_dropped(self, sample: EncodedSample, drop_reason: str, drop_detail: str) -> None:
        """Counts and lists a sample as dropped. The next row reports it."""
        self.dropped_counts[drop_reason] += 1
        if len(self.dropped_samples) < MAX_LISTED_PER_ROW:
            self.dropped_samples.append(
                DroppedSample(
                    sample.key,
                    sample.shard_name,
                    sample.source,
                    self._dataset_name(sample),
                    drop_reason,
                    drop_detail,
                    sample.refused_size,
                )
            )

    def _usable_samples(self, encoded_samples: Sequence[EncodedSample]) -> list[EncodedSample]:
        """The samples that can be used. The others are counted as dropped."""
        usable_samples = []
        for sample in encoded_samples:
            if sample.refused:
                self._record_dropped(sample, *sample.refused)
            else:
                usable_samples.append(sample)
        return usable_samples

    def select_rows(
        self, encoded_samples: list[EncodedSample], is_last: bool
    ) -> tuple[list[list[EncodedSample]], list[EncodedSample]]:
        """Divides samples, given in order, into the rows to make now and the samples that wait.

        Args:
            is_last: whether no samples follow. In that case, no sample waits.
        """
        usable_samples = self._usable_samples(encoded_samples)
        sample_sizes = [sample.token_and_patch_count for sample in usable_samples]
        row_limits = (self.data_config.seq_len, self.data_config.max_patches)
        if not self.data_config.pack:
            return [[sample] for sample in usable_samples], []
        if is_last or not usable_samples:
            row_indices = pack_first_fit(sample_sizes, *row_limits)
            return [[usable_samples[i] for i in sample_indices] for sample_indices in row_indices], []

        taken_indices = choose_row_samples(sample_sizes, *row_limits)
        taken_samples = [usable_samples[i] for i in taken_indices]
        for i in reversed(taken_indices):
            del usable_samples[i]
        return [taken_samples], usable_samples

    def postencode_sample(self, encoded_sample: EncodedSample) -> assemble_row.TokenizedSample:
        """Decodes the media of a sample, which must not be refused."""
        first_problem: tuple[str, str] | None = None
        media_items = []
        deadline = SampleDeadline(SAMPLE_TIMEOUT_S)
        for media_grid, media_record, media_bytes in zip(
            encoded_sample.grids, encoded_sample.media, encoded_sample.data, strict=True
        ):
            try:
                pixel_planes = self._decode_planes(media_record, media_bytes, media_grid, deadline)
            except UnusableSampleError as error:
                # The row is planned by now, so the sample stays in it with grey pictures and without loss.
                first_problem = first_problem or (error.reason, str(error))
                plane_shape = (1, media_grid.h * media_grid.w, 3 * self.pixel_settings.patch_size**2)
                pixel_planes = torch.full(plane_shape, GREY_VALUE, dtype=torch.uint8)
            media_items.append(assemble_row.MediaItem(media_grid, pixel_planes))

        loss_mask = encoded_sample.loss_mask
        if first_problem:
            loss_mask = torch.zeros_like(loss_mask)
            self._record_dropped(encoded_sample, *first_problem)
            self.refusal_meter.add_counts(0, {first_problem[0]: 1})
            self._log_bad_sample(encoded_sample, *first_problem)
        return assemble_row.TokenizedSample(encoded_sample.token_ids, loss_mask, media_items)

    def _decode_planes(
        self, media_record: dict[str, Any], media_bytes: bytes, media_grid: GridTHW, deadline: SampleDeadline
    ) -> Tensor:
        name = f"{media_record['kind']} {media_record['key']}"
        if "crc32" in media_record and media_record["crc32"] != zlib.crc32(media_bytes):
            raise UnusableSampleError(
                f"{media_record['kind']} changed since conversion", f"the CRC-32 of {name} differs"
            )
        try:
            deadline.check_time()
            return decode_media_planes(media_record, media_bytes, media_grid, self.pixel_settings, deadline)
        except SampleTimeoutError as error:
            raise UnusableSampleError("decoding takes too long", f"{name}: {error}") from error
        except Exception as error:  # decoders raise all kinds of errors on invalid bytes
            if is_machine_fault(error):
                raise
            raise UnusableSampleError(
                f"{media_record['kind']} does not decode", f"{name}: {error}"
            ) from error

    def make_row(self, encoded_samples: Sequence[EncodedSample], source_index: int = 0) -> TrainingRow:
        """Decodes samples and packs them into a row. If none can be used, the row is padding.

        Args:
            source_index: number of the source in the blend for which a row of padding counts.
        """
        usable_samples = self._usable_samples(encoded_samples)
        if not usable_samples:
            return self.empty_row(source_index)

        packed_row = assemble_row.pack_row(
            [self.postencode_sample(sample) for sample in usable_samples],
            self.spec,
            self.data_config.seq_len,
            self.chat_encoder.pad_token_id,
        )
        packed_row.sample_keys = [sample.key for sample in usable_samples]
        if self.source_names:
            packed_row.source_indices = [sample.source_index for sample in usable_samples]
        return self._attach_dropped(packed_row)

    def empty_row(self, source_index: int = 0) -> TrainingRow:
        """A row of padding without loss, for a planned row of which no sample can be used.

        It counts as one sample of one token, so that nothing divides by zero.

        Args:
            source_index: number of the source in the blend for which the row counts.
        """
        pad_token_id = self.chat_encoder.pad_token_id
        if pad_token_id is None:
            pad_token_id = assemble_row.padding_token(self.spec)
        padding_sample = assemble_row.TokenizedSample(
            torch.tensor([pad_token_id]), torch.zeros(1, dtype=torch.bool)
        )
        row = assemble_row.pack_row([padding_sample], self.spec, self.data_config.seq_len, pad_token_id)
        row.source_indices = [source_index] if self.source_names else []
        return self._attach_dropped(row)

    def _attach_dropped(self, packed_row: TrainingRow) -> TrainingRow:
        """The row with the samples that were dropped since the last one."""
        packed_row.dropped_counts = dict(self.dropped_counts)
        packed_row.dropped_samples = self.dropped_samples
        self.dropped_counts = Counter()
        self.dropped_samples = []
        return packed_row


def checked_json_bytes(raw_sample: RawSample) -> bytes:
    """The JSON of a sample. Raises UnusableSampleError if it was not read, or has changed."""
    if raw_sample.read_failure:
        raise UnusableSampleError(*raw_sample.read_failure)
    if raw_sample.json_bytes is None:
        raise LoaderError(
            "the sample has no .json member; was the data set written by `megatron-vl data convert`?"
        )
    if is_crc32_wrong(raw_sample.json_bytes):
        raise UnusableSampleError("text changed since conversion", "the CRC-32 of the sample's JSON differs")
    return raw_sample.json_bytes


def _source_text(record: Any) -> str:
    """The input file and record that a stored sample was converted from; empty if it does not name them.

    Args:
        record: the sample's JSON, as bytes or as an object.
    """
    try:
        source = (json.loads(record) if isinstance(record, bytes) else record)["source"]
        return f"{source['file']} record {source['record']}"
    except Exception:  # a damaged shard may hold any text
        return ""


def stored_media_grid(media_record: dict[str, Any], pixel_settings: PixelSettings) -> GridTHW:
    """The grid of a stored medium, from its stored size."""
    if media_record["kind"] == "image":
        return image_grid(media_record["height"], media_record["width"], pixel_settings)
    return video_grid(stored_video_info(media_record), pixel_settings)


def stored_video_info(media_record: dict[str, Any]) -> VideoInfo:
    """The facts of a stored video. Raises KeyError if one is missing."""
    sampling = media_record.get("sampling", "as a file")
    return VideoInfo(
        media_record["frames"], media_record["fps"], media_record["height"], media_record["width"], sampling
    )


def decode_media_planes(
    media_record: dict[str, Any],
    media_bytes: bytes,
    media_grid: GridTHW,
    pixel_settings: PixelSettings,
    deadline: SampleDeadline = NO_DEADLINE,
) -> Tensor:
    """Decodes a stored medium. A picture larger than its stored size is refused.

    Raises:
        PixelError: the medium does not decode.
        SampleTimeoutError: the deadline has passed while a video was decoded.
    """
    if media_record["kind"] == "image":
        return image_planes(
            media_bytes, media_grid, pixel_settings, media_record["height"] * media_record["width"]
        )
    return video_planes(media_bytes, stored_video_info(media_record), media_grid, pixel_settings, deadline)


# --- The loader


def build_loader(
    data_config: DataConfig,
    spec: ModelSpec,
    hf_dir: str | Path,
    *,
    dp_rank: int = 0,
    dp_size: int = 1,
    split_facts: SplitFacts | None = None,
    rows_per_step: int = 0,
) -> RowLoader:
    """The loader of data-parallel rank ``dp_rank``. It gives rows of the split ``train`` and never ends.

    Args:
        data_config: the data set, and how rows are made from it.
        hf_dir: folder of the tokenizer, chat template and image processor.
        split_facts: facts of the split, if another rank has read and checked the description. If they are
            None, this function reads it.
        rows_per_step: number of rows of a step on all ranks, a multiple of ``dp_size``; 0: one row on each
            rank. A state can be saved between steps.

    Raises:
        LoaderError: the folder is not a data set, or the split or a drawn source of it is empty.
        SizesError: a data set has no sizes for this tokenizer and chat template.
        DescriptionError: the data set's description could run code or leads out of its folder.
        PixelError, ChatError, FileNotFoundError: as their readers raise them.
    """
    split_facts = split_facts or read_description(data_config.path).split_facts("train")
    # Workers are forked, which the tokenizer's own threads would not survive.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    row_encoder = _make_row_encoder(data_config, spec, hf_dir, split_facts)
    blend_sources, datasets = _load_datasets(split_facts)
    if empty_sources := [s.source_name for s in blend_sources if s.sample_share and not s.sample_count]:
        advice = "widen its subset, or leave it out"
        raise LoaderError(f"{data_config.path}: {list_names(empty_sources)} has no samples; {advice}")
    if len(blend_sources) > 1:
        row_encoder.source_names = tuple(source.source_name for source in blend_sources)

    planning_context = PlanningContext(
        datasets,
        blend_sources,
        compute_tokenization_id(hf_dir, spec, data_config),
        row_encoder,
        rows_per_step or dp_size,
    )
    loader_identity = _loader_identity(data_config, row_encoder, split_facts)
    return RowLoader(planning_context, loader_identity, dp_rank, dp_size, data_config)


def _loader_identity(
    data_config: DataConfig, row_encoder: RowEncoder, split_facts: SplitFacts
) -> dict[str, Any]:
    """The settings that determine the rows, as JSON values. A state is valid only with the same ones."""
    chat_encoder = row_encoder.chat_encoder
    loader_identity = {
        "version": STATE_VERSION,
        "dataset": split_facts.dataset_identity,
        "seed": data_config.seed,
        "seq_len": data_config.seq_len,
        "shuffle": data_config.shuffle,
        "pack": data_config.pack,
        "max_patches": data_config.max_patches,
        # These determine the lengths of samples, and so the rows.
        "pixels": [getattr(row_encoder.pixel_settings, name) for name in PIXEL_FIELDS],
        "chat_template": zlib.crc32(chat_encoder.chat_template.encode()),
        "tokenizer": chat_encoder.tokenizer_digest(),
        **_processor_identity(row_encoder.pixel_settings),
    }
    if data_config.shuffle:
        loader_identity["shuffle_block"] = planned_rows.SHUFFLE_BLOCK
    if data_config.pack:
        loader_identity["packing_buffer"] = planned_rows.PACKING_BUFFER
    if chat_encoder.template_writes_thinking:
        loader_identity |= dataclasses.asdict(chat_encoder.thinking_rule)
    return loader_identity


def _processor_identity(pixel_settings: PixelSettings) -> dict[str, Any]:
    """The settings of pixels that come from the processor's files, as JSON values, such as
    ``processor.patch_size``."""
    settings = json.loads(json.dumps(dataclasses.asdict(pixel_settings)))
    return {
        f"{PROCESSOR_PREFIX}{name}": value for name, value in settings.items() if name not in PIXEL_FIELDS
    }


def validation_rows(
    data_config: DataConfig,
    spec: ModelSpec,
    hf_dir: str | Path,
    split_name: str = "val",
    split_facts: SplitFacts | None = None,
) -> Iterator[TrainingRow]:
    """Yields the rows of one pass through a split, in its order.

    Rows are packed while samples are read, so no stored sizes are needed. The errors are those of
    :func:`build_loader`.

    Args:
        split_facts: as for :func:`build_loader`.
    """
    split_facts = split_facts or read_description(data_config.path).split_facts(split_name)
    row_encoder = _make_row_encoder(data_config, spec, hf_dir, split_facts)
    buffer_size = planned_rows.PACKING_BUFFER if data_config.pack else 1

    blend_sources, datasets = _load_datasets(split_facts)
    waiting_samples: list[EncodedSample] = []
    for encoded_sample in _samples_in_order(row_encoder, blend_sources, datasets):
        waiting_samples.append(encoded_sample)
        if len(waiting_samples) == buffer_size:
            selected_rows, waiting_samples = row_encoder.select_rows(waiting_samples, is_last=False)
            yield from map(row_encoder.make_row, selected_rows)
    selected_rows, _ = row_encoder.select_rows(waiting_samples, is_last=True)
    yield from map(row_encoder.make_row, selected_rows)


def _samples_in_order(
    row_encoder: RowEncoder, blend_sources: Sequence[BlendSource], loaded_datasets: Sequence[LoadedDataset]
) -> Iterator[EncodedSample]:
    """All samples of all sources, one after the other."""
    for blend_source, loaded_dataset in zip(blend_sources, loaded_datasets, strict=True):
        read_ahead = ReadAhead([loaded_dataset.dataset], READ_TOGETHER, block_count=1, rank_count=1)
        sample_reader = open_sample_reader(loaded_dataset.dataset, partial(read_ahead.take, 0))
        end_sample = blend_source.first_sample + blend_source.sample_count
        for sample_index in range(blend_source.first_sample, end_sample):
            if (sample_index - blend_source.first_sample) % READ_AHEAD == 0:
                next_samples = range(sample_index, min(sample_index + READ_AHEAD, end_sample))
                read_ahead.expect((0, next_sample) for next_sample in next_samples)
            crude_sample = sample_reader[sample_index]
            if crude_sample is not None:  # the data set's description excludes it
                yield row_encoder.preencode_sample(row_encoder.cook(crude_sample))


def _make_row_encoder(
    data_config: DataConfig, spec: ModelSpec, hf_dir: str | Path, split_facts: SplitFacts
) -> RowEncoder:
    row_encoder = RowEncoder(data_config, spec, hf_dir)
    row_encoder.max_consecutive_refusals = max(MAX_CONSECUTIVE_REFUSALS, 3 * split_facts.largest_shard)
    _check_patch_sizes(row_encoder.pixel_settings, spec, hf_dir)
    return row_encoder


def _load_datasets(split_facts: SplitFacts) -> tuple[tuple[BlendSource, ...], list[LoadedDataset]]:
    """The sources of a split, and Energon's data set of each source."""
    first_path, _ = split_facts.datasets[0]
    blend_sources = read_blend_sources(split_facts.dataset_identity, resolve_location(first_path).name)
    loaded_datasets = [_load_dataset(*dataset) for dataset in split_facts.datasets]
    loaded_counts = [len(loaded.dataset) for loaded in loaded_datasets]
    if loaded_counts != [source.full_sample_count for source in blend_sources]:
        raise RuntimeError(
            f"Energon reads other data sets than {[source.source_name for source in blend_sources]}"
        )
    return blend_sources, loaded_datasets


def _load_dataset(dataset_path: str, split_name: str) -> LoadedDataset:
    """Energon's data set, or those of the parts of a folder as one."""
    single_worker = WorkerConfig(rank=0, world_size=1, num_workers=0)
    part_datasets = []
    for folder in part_folders(resolve_location(dataset_path)) or [dataset_path]:
        loaded_split = load_dataset(str(folder)).get_datasets(
            training=False, split_part=split_name, worker_config=single_worker, decoder=None
        )
        part_datasets.append(loaded_split.datasets[0].dataset)
    if len(part_datasets) == 1:
        return loaded_split.datasets[0]
    return LoadedDataset(dataset=JoinedDataset(EPath(dataset_path), part_datasets))


def _check_patch_sizes(pixel_settings: PixelSettings, spec: ModelSpec, hf_dir: str | Path) -> None:
    vision_spec = spec.vision
    processor_sizes = (
        pixel_settings.patch_size,
        pixel_settings.merge_size,
        pixel_settings.temporal_patch_size,
    )
    model_sizes = (vision_spec.patch_size, vision_spec.spatial_merge_size, vision_spec.temporal_patch_size)
    if processor_sizes != model_sizes:
        raise LoaderError(
            f"{hf_dir}: patch, merge and temporal patch size are {processor_sizes} in the image processor,"
            f" {model_sizes} in config.json"
        )
