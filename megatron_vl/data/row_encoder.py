"""Turns samples into rows inside a loader process.

First come tokens, loss mask and grids, from the stored sizes, without decoding (``preencode_sample``). Then
pixels are decoded, and the samples become one :class:`~megatron_vl.data.packing.training_row.TrainingRow`
(``make_row``). No sample is lost silently: one that cannot be used is logged, counted in ``dropped_counts``
of the next row and listed in its ``dropped_samples``.

If a medium does not decode after packing, its sample stays in the row, grey and without loss, so that all
ranks see the same row.
"""

import dataclasses
import json
import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from megatron_vl.config import DataConfig
from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample, pack_row, padding_token
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.sample.boxes import SampleObjects
from megatron_vl.data.sample.chat import ChatEncoder, ChatTemplateError
from megatron_vl.data.sample.deadline import SampleTimeoutError, check_time, limited_time
from megatron_vl.data.sample.documents import encode_document
from megatron_vl.data.sample.medium import UnusableError, decode_media_planes, stored_media_grid
from megatron_vl.data.sample.parts import ExchangeStart, SamplePart, cut_conversation, cut_document
from megatron_vl.data.sample.pixel_settings import read_pixel_settings
from megatron_vl.data.sample.written_numbers import read_number
from megatron_vl.data.source.bad_samples import (
    MAX_LISTED_PER_ROW,
    NOT_IN_CHAT_TEMPLATE,
    TOO_LONG,
    TOO_MANY_PATCHES,
    DroppedSample,
)
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.tolerant_reader import BROKEN_FIELD, is_crc32_wrong
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW
from megatron_vl.system.errors import is_machine_fault

log = logging.getLogger(__name__)

MAX_LOGGED_PER_REASON = 10
MAX_REMEMBERED_SAMPLES = 8
"""Number of samples in several parts whose tokens a process remembers until it needs their next part."""
GREY_VALUE = 128
"""Value of all pixels that stand for a medium that does not decode."""


@dataclass
class RawSample:
    """A sample as its shard stores it. Encoding adds tokens, loss mask and grids, and decodes nothing."""

    key: str
    json_bytes: bytes | None
    media_bytes: dict[str, bytes]
    shard_name: str = ""
    source_index: int = 0
    refused: tuple[str, str] | None = None
    """Reason and detail if the sample could not be read or cannot be used."""
    refused_size: int = 0
    """The number of tokens or patches for which the sample is refused; 0 for another reason."""
    source: str = ""
    token_ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    loss_mask: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    media: list[dict[str, Any]] = field(default_factory=list)
    """The stored facts of each medium, in the order of the text."""
    grids: list[GridTHW] = field(default_factory=list)
    objects: SampleObjects | None = None
    is_document: bool = False
    parts: list[SamplePart] = field(default_factory=list)

    @property
    def token_and_patch_count(self) -> tuple[int, int]:
        return len(self.token_ids), sum(grid.num_patches for grid in self.grids)


def cook_sample(crude_sample: dict[str, Any], source_index: int = 0) -> RawSample:
    """Turns Energon's crude sample of a source into a :class:`RawSample`.

    It never fails: missing parts are found and counted when encoding.
    """
    return RawSample(
        crude_sample["__key__"],
        crude_sample.get("json"),
        {name: data for name, data in crude_sample.items() if name != "json" and not name.startswith("__")},
        crude_sample.get("__shard__", ""),
        source_index,
        crude_sample.get(BROKEN_FIELD),
    )


def refusal_of_error(error: Exception) -> UnusableError:
    """The reason for which a sample is left out whose encoding raised ``error``."""
    if isinstance(error, UnusableError):
        return error
    if isinstance(error, ChatTemplateError):
        return UnusableError(NOT_IN_CHAT_TEMPLATE, str(error))
    if isinstance(error, SampleTimeoutError):
        return UnusableError("encoding takes too long", str(error))
    return UnusableError("cannot be encoded", f"{type(error).__name__}: {error}")


class RowEncoder:
    """Turns samples into rows inside a loader process."""

    def __init__(self, data_config: DataConfig, spec: ModelSpec, hf_dir: str | Path) -> None:
        self.data_config, self.spec = data_config, spec
        self.chat_encoder = ChatEncoder(hf_dir, spec, data_config)
        self.pixel_settings = read_pixel_settings(hf_dir, data_config)
        self.source_names: tuple[str, ...] = ()
        """Names of the sources of a blend. If it is not empty, rows say which source each sample is from."""
        self.remembered_samples: dict[tuple[Any, ...], tuple[Tensor, Tensor, list[SamplePart]]] = {}
        """Tokens, loss mask and parts of the last samples in several parts."""
        self.dropped_counts: Counter[str] = Counter()
        self.dropped_samples: list[DroppedSample] = []
        self.logged_samples: dict[str, set[tuple[str, ...]]] = {}
        """The samples whose message was logged, by reason."""

    def preencode_sample(self, sample: RawSample) -> RawSample:
        """Tokenizes a sample without decoding its media. An unusable sample comes back ``refused``.

        Raises:
            LoaderError: the data set was not written by this toolkit.
        """
        try:
            with limited_time():
                self._encode_sample(sample)
            return sample
        except Exception as error:  # a sample from outside may cause any error
            if is_machine_fault(error):
                raise
            refusal = refusal_of_error(error)

        refused = (refusal.reason, str(refusal))
        self._log_bad_sample(sample, *refused)
        return RawSample(
            sample.key,
            sample.json_bytes,
            {},
            sample.shard_name,
            sample.source_index,
            refused=refused,
            refused_size=refusal.size,
            source=_source_text(sample.json_bytes),
        )

    def _encode_sample(self, sample: RawSample) -> None:
        record = json.loads(checked_json_bytes(sample), parse_float=read_number)
        if missing_keys := [m["key"] for m in record["media"] if m["key"] not in sample.media_bytes]:
            raise UnusableError("medium missing", f"the shard has no {', '.join(missing_keys)} of the sample")

        sample.media = record["media"]
        sample.grids = [stored_media_grid(item, self.pixel_settings) for item in sample.media]
        sample.source = _source_text(record)
        sample.is_document = "document" in record
        sample_key = (sample.source_index, sample.shard_name, sample.key, sample.json_bytes)
        if remembered := self.remembered_samples.get(sample_key):
            sample.token_ids, sample.loss_mask, sample.parts = remembered
            return
        objects = sample.objects = SampleObjects(record, sample.grids, self.spec.vision)
        objects.check_inside()
        if sample.is_document:
            [document] = objects.written_messages()
            tokens, mask, spans = encode_document(self.chat_encoder, document["content"], sample.grids)
            if (weight := record.get("loss_weight", 1.0)) != 1:
                mask = mask.float() * weight
        else:
            encode_conversation = partial(
                self.chat_encoder.encode,
                objects.written_messages(),
                sample.grids,
                record.get("tools", ()),
                record.get("chat_template_kwargs"),
            )
            tokens, mask = encode_conversation()
        if not len(tokens):
            raise UnusableError("no tokens", "the chat template renders nothing")
        sample.token_ids, sample.loss_mask = tokens, mask
        if (too_large := self._too_large(sample)) is None:
            return

        patch_counts = [grid.num_patches for grid in sample.grids]
        limits = (self.data_config.seq_len, self.data_config.max_patches)
        can_be_cut = self.data_config.too_long == "cut" and not objects.has_boxes
        if can_be_cut and sample.is_document:
            sample.parts = cut_document(len(tokens), spans, patch_counts, *limits)
        elif can_be_cut:
            starts: list[ExchangeStart] = []
            encode_conversation(exchange_starts=starts)
            sample.parts = cut_conversation(len(tokens), starts, patch_counts, *limits)
        if not sample.parts:
            raise too_large
        self.remembered_samples[sample_key] = (tokens, mask, sample.parts)
        if len(self.remembered_samples) > MAX_REMEMBERED_SAMPLES:
            self.remembered_samples.pop(next(iter(self.remembered_samples)))

    def _too_large(self, sample: RawSample) -> UnusableError | None:
        """Why a sample does not fit into a row; None if it does."""
        tokens, patches = sample.token_and_patch_count
        for size, unit, name, reason in (
            (tokens, "tokens", "seq_len", TOO_LONG),
            (patches, "patches", "max_patches", TOO_MANY_PATCHES),
        ):
            if 0 < (limit := getattr(self.data_config, name)) < size:
                return UnusableError(reason, f"{size} {unit} do not fit into data.{name} {limit}", size)
        return None

    def _dataset_name(self, sample: RawSample) -> str:
        """The name of a sample's source in a blend; empty without a blend."""
        return self.source_names[sample.source_index] if self.source_names else ""

    def _log_bad_sample(self, sample: RawSample, reason: str, detail: str) -> None:
        """Logs the first samples of a reason, each once, however often the data set is repeated.

        They are at most ten, whatever the number of the loader's processes.
        """
        logged = self.logged_samples.setdefault(reason, set())
        worker = get_worker_info()
        limit = max(1, MAX_LOGGED_PER_REASON // worker.num_workers) if worker else MAX_LOGGED_PER_REASON
        dataset_name = self._dataset_name(sample)
        name = (dataset_name, sample.shard_name, sample.key)
        if len(logged) == limit or name in logged:
            return
        logged.add(name)
        process_text = f" by loader process {worker.id}" if worker else ""
        note = f" (further ones are counted, not logged{process_text})" if len(logged) == limit else ""
        shown_name = f"{sample.key} of {dataset_name}" if dataset_name else sample.key
        log.warning("sample %s: %s: %s%s", shown_name, reason, detail, note)

    def _record_dropped(self, sample: RawSample, reason: str, detail: str) -> None:
        """Counts and lists a sample as dropped. The next row reports it."""
        self.dropped_counts[reason] += 1
        if len(self.dropped_samples) < MAX_LISTED_PER_ROW:
            place = (sample.key, sample.shard_name, sample.source, self._dataset_name(sample))
            self.dropped_samples.append(DroppedSample(*place, reason, detail, sample.refused_size))

    def usable_samples(self, samples: Sequence[RawSample]) -> list[RawSample]:
        """The samples that can be used. The others are counted as dropped."""
        for sample in samples:
            if sample.refused:
                self._record_dropped(sample, *sample.refused)
        return [sample for sample in samples if not sample.refused]

    def sample_part(self, sample: RawSample, part_index: int) -> RawSample:
        """A part of a sample that is cut, with its media; the sample itself if it is whole.

        An exchange of a conversation that does not fit into a row comes back ``refused``.

        Raises:
            IndexError: the sample has no such part.
        """
        if not sample.parts:
            return sample
        part = sample.parts[part_index]
        head, rest = slice(part.head_tokens), slice(part.start, part.end)
        loss_mask = torch.cat([sample.loss_mask[head], sample.loss_mask[rest]])
        loss_mask[0] = 0  # nothing in the part predicts it
        head_media, media = slice(part.head_media), slice(part.first_medium, part.end_medium)
        made = dataclasses.replace(
            sample,
            key=f"{sample.key}#{part_index + 1}",
            token_ids=torch.cat([sample.token_ids[head], sample.token_ids[rest]]),
            loss_mask=loss_mask,
            media=sample.media[head_media] + sample.media[media],
            grids=sample.grids[head_media] + sample.grids[media],
            parts=[],
        )
        if too_large := self._too_large(made):
            made.refused, made.refused_size = (too_large.reason, str(too_large)), too_large.size
            self._log_bad_sample(made, *made.refused)
        return made

    def postencode_sample(self, sample: RawSample) -> TokenizedSample:
        """Decodes the media of a sample, which must not be refused."""
        problem: UnusableError | None = None
        media_items = []
        with limited_time():
            for grid, record in zip(sample.grids, sample.media, strict=True):
                try:
                    planes = self._decode_planes(record, sample.media_bytes[record["key"]], grid)
                except UnusableError as error:
                    # The row is planned by now, so the sample stays in it with grey images and without loss.
                    problem = problem or error
                    shape = (1, grid.h * grid.w, 3 * self.pixel_settings.patch_size**2)
                    planes = torch.full(shape, GREY_VALUE, dtype=torch.uint8)
                media_items.append(MediaItem(grid, planes))

        loss_mask = sample.loss_mask
        if problem:
            loss_mask = torch.zeros_like(loss_mask)
            self._record_dropped(sample, problem.reason, str(problem))
            self._log_bad_sample(sample, problem.reason, str(problem))
        return TokenizedSample(sample.token_ids, loss_mask, media_items)

    def _decode_planes(self, record: dict[str, Any], media_bytes: bytes, grid: GridTHW) -> Tensor:
        kind, name = record["kind"], f"{record['kind']} {record['key']}"
        if "crc32" in record and record["crc32"] != zlib.crc32(media_bytes):
            raise UnusableError(f"{kind} changed since conversion", f"the CRC-32 of {name} differs")
        try:
            check_time()
            return decode_media_planes(record, media_bytes, grid, self.pixel_settings)
        except SampleTimeoutError as error:
            raise UnusableError("decoding takes too long", f"{name}: {error}") from error
        except Exception as error:  # decoders raise all kinds of errors on invalid bytes
            if is_machine_fault(error):
                raise
            raise UnusableError(f"{kind} does not decode", f"{name}: {error}") from error

    def make_row(self, samples: Sequence[RawSample], source_index: int = 0) -> TrainingRow:
        """Decodes samples and packs them into a row.

        If none can be used, the row is padding without loss, and counts as one sample of one token, so that
        nothing divides by zero.

        Args:
            source_index: number of the source in the blend for which a row of padding counts.
        """
        usable = self.usable_samples(samples)
        pad_token = self.chat_encoder.pad_token_id
        pad_token = padding_token(self.spec) if pad_token is None else pad_token
        padding = TokenizedSample(torch.tensor([pad_token]), torch.zeros(1, dtype=torch.bool))
        row = pack_row(
            [self.postencode_sample(sample) for sample in usable] or [padding],
            *(self.spec, self.data_config.seq_len, pad_token),
        )
        row.sample_keys = [sample.key for sample in usable]
        if self.source_names:
            row.source_indices = [sample.source_index for sample in usable] or [source_index]
        row.dropped_counts, self.dropped_counts = dict(self.dropped_counts), Counter()
        row.dropped_samples, self.dropped_samples = self.dropped_samples, []
        return row


def checked_json_bytes(sample: RawSample) -> bytes:
    """The JSON of a sample. Raises UnusableError if it was not read, or has changed."""
    if sample.refused:
        raise UnusableError(*sample.refused)
    if sample.json_bytes is None:
        raise LoaderError(
            "the sample has no .json member; was the data set written by `megatron-vl data convert`?"
        )
    if is_crc32_wrong(sample.json_bytes):
        raise UnusableError("text changed since conversion", "the CRC-32 of the sample's JSON differs")
    return sample.json_bytes


def _source_text(record: Any) -> str:
    """The input file and record that a stored sample was converted from; empty if it does not name them."""
    try:
        source = (json.loads(record) if isinstance(record, bytes) else record)["source"]
        return f"{source['file']} record {source['record']}"
    except Exception:  # a damaged shard may hold any text
        return ""
