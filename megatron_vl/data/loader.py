"""The loader: reads shards written by ``megatron-vl data convert`` with Energon and packs rows.

A worker first computes tokens, loss mask and grids from the stored sizes, without decoding
(``preencode_sample``). It then packs on two budgets (``select_rows``), decodes pixels (``postencode_sample``)
and makes one :class:`Row` (``pack_selected_samples``). No sample is lost silently: one that cannot be used is
logged, counted in ``Row.dropped`` of the next row and listed in its ``Row.dropped_samples``. A sample that
cannot be read or encoded is marked and still goes through Energon until rows are chosen, so that a restored
state stays valid when some of its samples can no longer be read.

If a medium does not decode after packing, its sample stays in the row, grey and without loss, so that all
ranks see the same row. One loader serves a data-parallel replica. (A validation pass ends: samples dropped
after its last row have no row to be counted in and are only logged.)
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
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
from torch.utils.data import get_worker_info

from megatron_vl.config import RULES_BEFORE, DataConfig, video_rule
from megatron_vl.data import assemble
from megatron_vl.data.bad_samples import LISTED_PER_ROW, BadSampleMeter, DroppedSample
from megatron_vl.data.chat import ChatEncoder
from megatron_vl.data.deadline import UNLIMITED, Deadline, OutOfTimeError
from megatron_vl.data.description import LoaderError, SplitFacts, difference, read_description
from megatron_vl.data.early_saves import allow_early_saves
from megatron_vl.data.location import location
from megatron_vl.data.packing import RowPacking, fill_row, pack_greedily
from megatron_vl.data.pixels import (
    PixelSettings,
    VideoInfo,
    image_grid,
    image_planes,
    read_pixel_settings,
    video_grid,
    video_planes,
)
from megatron_vl.data.reading import BROKEN, crc_differs, make_tolerant
from megatron_vl.data.row import Row
from megatron_vl.data.shuffling import GIB, ShuffleBufferDataset, at_most
from megatron_vl.data.state import StateError, from_json, to_json
from megatron_vl.data.thinking import ThinkingRule
from megatron_vl.signals import shield_loader_worker
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW

log = logging.getLogger(__name__)

__all__ = ["BadSampleMeter", "DroppedSample", "LoaderError", "RowLoader", "build_loader", "pack_greedily"]

MOST_REFUSED_IN_A_ROW = 1000
"""Number of consecutive unusable samples at which a worker stops instead of searching without end. It is
three times the largest shard if that is more, so that missing shards do not end a run that has others."""
GREY = 128
PIXEL_FIELDS = (
    "min_pixels",
    "max_pixels",
    "video_min_pixels",
    "video_max_pixels",
    "video_fps",
    "video_max_frames",
)
STATE_VERSION = 2
"""Version of what determines the order of samples:
another way of packing reads the same state differently."""


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

    @property
    def size(self) -> tuple[int, int]:
        """Number of tokens and of patches."""
        return len(self.token_ids), sum(grid.patches for grid in self.grids)


@dataclasses.dataclass(kw_only=True)
class DecodedSample(Sample):
    """A sample that is ready for a row; None if it was refused."""

    sample: assemble.Sample | None


@stateless
def cook(crude: dict[str, Any]) -> RawSample:
    """Turns Energon's crude sample into a :class:`RawSample`.

    It never fails: missing parts are found and counted when encoding.
    """
    members = {name: data for name, data in crude.items() if not name.startswith("__") and name != "json"}
    shard, broken = crude.get("__shard__", ""), crude.get(BROKEN)
    return RawSample(
        **basic_sample_keys(crude), text=crude.get("json"), members=members, shard=shard, broken=broken
    )


def stored_bytes(sample: RawSample) -> int:
    """Size in bytes of a sample in the shuffle buffer."""
    return len(sample.text or b"") + sum(map(len, sample.members.values()))


class RowEncoder(DefaultTaskEncoder):
    """Turns samples into rows inside a loader worker."""

    cookers = [Cooker(cook)]
    decoder = None  # raw bytes: Energon's decoder would decode every picture before packing
    # Energon's own limit (100 consecutive failures)
    # would end the process before the run's limit on bad samples.
    __default_failure_tolerance__ = 0

    def __init__(self, data: DataConfig, spec: ModelSpec, hf_dir: str | Path) -> None:
        super().__init__()
        self.data, self.spec = data, spec
        self.chat = ChatEncoder(hf_dir, spec, data.video_prompt, ThinkingRule.of(data))
        self.settings = read_pixel_settings(hf_dir, data)
        self.dropped: Counter[str] = Counter()
        self.dropped_samples: list[DroppedSample] = []
        self.logged: Counter[str] = Counter()
        self.refused_in_a_row = 0
        self.smallest: dict[str, int] = {}
        """The smallest number of tokens or patches, by reason,
        of the too large samples since the last usable one."""
        self.most_refused = MOST_REFUSED_IN_A_ROW
        self.shielded = False
        self.shuffles = False

    def _load_dataset(self, dataset: Any, worker_rotation_offset: int, worker_config: WorkerConfig) -> Any:
        built = super()._load_dataset(dataset, worker_rotation_offset, worker_config)
        make_tolerant(built, self.data.sample_timeout_s)
        return built

    def build_encode_sample(self, dataset: Any, *, worker_config: WorkerConfig) -> Any:
        """Uses our shuffle buffer in place of Energon's, which has no limit in bytes."""
        if self.shuffles and self.data.shuffle_buffer > 1:
            most_bytes = int(self.data.shuffle_buffer_gib * GIB)
            size = self.data.shuffle_buffer
            dataset = ShuffleBufferDataset(dataset, size, most_bytes, stored_bytes, worker_config)
        return super().build_encode_sample(dataset, worker_config=worker_config)

    def build_batch(
        self, dataset: Any, *, packing_buffer_size: int, worker_config: WorkerConfig, **unused: Any
    ) -> RowPacking:
        select, encode, pack = self.select_rows, self.postencode_sample, self.pack_selected_samples
        return RowPacking(dataset, packing_buffer_size, select, encode, pack, worker_config)

    @stateless
    def preencode_sample(self, sample: RawSample) -> EncodedSample:
        if not self.shielded:
            self.shielded = True
            if get_worker_info() is not None:
                shield_loader_worker()

        try:
            encoded = self._encode(sample)
        except UnusableError as error:
            refused = (error.reason, str(error))
            if error.size:
                self.smallest[error.reason] = min(error.size, self.smallest.get(error.reason, error.size))
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
            sample, shard=sample.shard, source=_source(sample.text), refused=refused
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
        token_ids, loss_mask = self.chat.encode(record["messages"], grids, record.get("tools", ()))
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
            raise UnusableError("longer than seq_len", detail, tokens)
        if self.data.max_patches and patches > self.data.max_patches:
            detail = f"{patches} patches do not fit into data.max_patches {self.data.max_patches}"
            raise UnusableError("more than max_patches", detail, patches)

    def _advice(self) -> str:
        """For samples that were too large: the field to raise, and the value that is needed at least."""
        units = {
            "longer than seq_len": ("tokens", "data.seq_len"),
            "more than max_patches": ("patches", "data.max_patches"),
        }
        if not self.smallest:
            return ""

        found = [
            f"the smallest {reason} has {size} {units[reason][0]}" for reason, size in self.smallest.items()
        ]
        fields = " and ".join(units[reason][1] for reason in self.smallest)
        return f". Of these, {', '.join(found)}: raise {fields}, or lower data.max_pixels if pictures fill it"

    def _log(self, sample: Sample, reason: str, detail: str) -> None:
        if self.logged[reason] <= 10:
            last = " (further ones are counted, not logged)" if self.logged[reason] == 10 else ""
            log.warning("sample %s: %s: %s%s", sample.__key__, reason, detail, last)

    def _drop(self, sample: EncodedSample, reason: str, detail: str) -> None:
        """Counts and lists a sample as dropped; the next row reports it."""
        self.dropped[reason] += 1
        if len(self.dropped_samples) < LISTED_PER_ROW:
            self.dropped_samples.append(
                DroppedSample(sample.__key__, sample.shard, sample.source, reason, detail)
            )

    def select_rows(
        self, samples: list[EncodedSample], last: bool
    ) -> tuple[list[list[EncodedSample]], list[EncodedSample]]:
        """From a buffer: the rows to make now and the samples that wait (see :class:`RowPacking`)."""
        usable = [sample for sample in samples if not sample.refused]
        for sample in samples:
            if sample.refused:
                self._drop(sample, *sample.refused)

        sizes = [sample.size for sample in usable]
        if not self.data.pack:
            return [[sample] for sample in usable], []
        if last or not usable:
            bins = pack_greedily(sizes, self.data.seq_len, self.data.max_patches)
            return [[usable[i] for i in bin_] for bin_ in bins], []

        row = fill_row(sizes, self.data.seq_len, self.data.max_patches)
        taken = set(row)
        return [[usable[i] for i in row]], [sample for i, sample in enumerate(usable) if i not in taken]

    @stateless
    def postencode_sample(self, sample: EncodedSample) -> DecodedSample:
        if sample.refused:  # only after a restore: it was usable when its row was chosen
            self._drop(sample, *sample.refused)
            return DecodedSample.derive_from(sample, sample=None)
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
        if item.get("crc32", zlib.crc32(data)) != zlib.crc32(data):
            raise UnusableError(f"{item['kind']} changed since conversion", f"the CRC-32 of {name} differs")
        try:
            deadline.check()
            return planes_of(item, data, grid, self.settings, deadline)
        except OutOfTimeError as error:
            raise UnusableError("decoding takes too long", f"{name}: {error}") from error
        except Exception as error:  # decoders raise all kinds of errors on invalid bytes
            raise UnusableError(f"{item['kind']} does not decode", f"{name}: {error}") from error

    @stateless
    def pack_selected_samples(self, samples: list[DecodedSample]) -> Row:
        ready = [(s.__key__, s.sample) for s in samples if s.sample is not None]
        if not ready:
            raise SkipSample  # the next row reports them

        chosen = [sample for _, sample in ready]
        rule = self.data.video_positions
        row = assemble.pack_row(chosen, self.spec, self.data.seq_len, self.chat.pad_token_id, rule)
        row.keys = [key for key, _ in ready]

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
    return video_grid(VideoInfo(item["frames"], item["fps"], item["height"], item["width"]), settings)


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
    video = VideoInfo(item["frames"], item["fps"], item["height"], item["width"])
    return video_planes(data, video, grid, settings, deadline)


# --- The loader


WAYS_OUT = {
    "dataset": (
        "give the data set that the run began with, or keep weights and optimizer and read the data from its "
        "start with --checkpoint.restart_data true"
    ),
    "split": "load the state of this split",
    "dp_rank": "give each rank its own state",
    "dp_size": (
        "start with as many data-parallel ranks as before (processes / (tp x pp)), or a new run from the"
        " weights"
    ),
    "num_workers": "set data.num_workers back, or start a new run from the checkpoint's weights",
    "pixels": f"set data.{', data.'.join(f for f in PIXEL_FIELDS if f != 'video_min_pixels')} back",
    "chat_template": "give the chat template that the run began with",
    "video_positions": "resume with the rule that the run began with: set data.video_positions to that",
    "video_prompt": "resume with the rule that the run began with: set data.video_prompt to that",
    "empty_think": "resume with the rule that the run began with: set data.empty_think to that",
    "earlier_answers": "resume with the rule that the run began with: set data.earlier_answers to that",
    "version": (
        "resume with the version of this program that saved it, or start a new run from the checkpoint's"
        " weights"
    ),
}


class RowLoader:
    """Iterator over the rows of one data-parallel replica.

    Training repeats the data set without end; validation ends after one pass.
    """

    def __init__(self, loader: Any, identity: dict[str, Any], facts: SplitFacts, notes: list[str]) -> None:
        self._loader = loader
        self._identity = identity
        self._former = facts.former
        self.samples = facts.samples
        """Number of samples in the split, over all ranks; None for a metadataset."""
        self.notes = notes
        """Lines to print once at the start of a run."""
        self._rows: Iterator[Row] | None = None

    def __iter__(self) -> RowLoader:
        return self

    def __next__(self) -> Row:
        if self._loader is None:
            raise LoaderError("the loader is closed")
        if self._rows is None:
            self._rows = iter(self._loader)
        try:
            return next(self._rows)
        except FatalSampleError as error:
            # Energon wraps our message in lines of its own.
            found = re.search(r"\d+ samples in a row cannot be used [^\n]*", str(error))
            raise LoaderError(found.group() if found else str(error)) from error

    @property
    def dataset(self) -> Any:
        """The data set's identity in this loader's states."""
        return self._identity["dataset"]

    def state_dict(self) -> dict[str, Any]:
        """The loader's state as JSON values.

        After :meth:`load_state_dict`, the next row is the one that would come next here.
        """
        return {"identity": self._identity, "energon": to_json(self._loader.save_state_rank())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was saved. Call it before the first row is read.

        Raises:
            StateError: the state belongs to another data set, rank, number of ranks or workers, or to other
                packing (Energon would silently restore some of these wrongly), or rows were already read.
        """
        if self._rows is not None:
            raise StateError("a loader state must be loaded before the first row is read")
        saved = self._with_present_fields(state.get("identity", {}))
        if found := difference(saved.get("dataset"), self._identity["dataset"]):
            way_out = WAYS_OUT["dataset"]
            raise StateError(f"the loader state was saved with another data set: {found}; {way_out}")
        for name, value in self._identity.items():
            before = saved.get(name, RULES_BEFORE.get(name))
            if name != "dataset" and before != value:
                raise StateError(
                    f"the loader state was saved with {name} = {before!r}, this loader has {value!r} "
                    f"and would not make the same rows; {WAYS_OUT.get(name, f'set data.{name} back')}"
                )

        energon = from_json(state["energon"])
        self._loader.restore_state_rank(energon)
        if energon is not None and self._identity["num_workers"]:
            # Energon 7.4.1 ignores the offset here,
            # so the next save would rewind a worker that has not sent a row since.
            counters = [
                (w.state.sample_index + w.offset - 1) if w.state is not None else -1
                for w in energon.worker_states
            ]
            self._loader._worker_sample_counters = counters

    def _with_present_fields(self, saved: dict[str, Any]) -> dict[str, Any]:
        """An identity that an earlier version saved.

        Missing fields get their current value, with a note.
        """
        saved = dict(saved)
        now = self._identity

        if "shuffle_buffer_gib" in now and "shuffle_buffer_gib" not in saved:
            saved["shuffle_buffer_gib"] = now["shuffle_buffer_gib"]
            if now["shuffle_buffer_gib"]:
                self.notes.append(
                    "the loader state is from before the shuffle buffer had a limit in bytes: the order of"
                    f" samples stays the same if the buffer never holds {now['shuffle_buffer_gib']:g}"
                    " GiB (data.shuffle_buffer_gib; 0 keeps the order in any case)"
                )

        if isinstance(saved.get("dataset"), str):
            if saved["dataset"] != self._former:
                raise StateError(
                    f"the loader state was saved with the data set {saved['dataset']!r}, this loader reads "
                    f"{self._former!r}; {WAYS_OUT['dataset']}"
                )
            saved["dataset"] = now["dataset"]
            if not now["dataset"].get("content"):
                self.notes.append(
                    "the loader state is from before mixtures were identified by content: it says"
                    f" only {self._former}. If weights or parts have changed since it was saved, stop"
                    " here and start with --checkpoint.restart_data true"
                )
        return saved

    def close(self) -> None:
        """Ends the worker processes. The loader cannot be used afterwards."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        self._rows = self._loader = None


def build_loader(
    data: DataConfig,
    spec: ModelSpec,
    hf_dir: str | Path,
    *,
    dp_rank: int = 0,
    dp_size: int = 1,
    split: str = "train",
    facts: SplitFacts | None = None,
) -> RowLoader:
    """The loader of data-parallel rank ``dp_rank``.

    Args:
        data: the data set, and how rows are made from it.
        hf_dir: folder of the tokenizer, chat template and image processor.
        split: ``train`` (shuffled, endless) or ``val`` (in order, once).
        facts: facts of this split if another rank has read and checked the description; None: read it here.

    Raises:
        LoaderError: the folder is not a data set,
            or the split is empty or has fewer samples than ranks x workers.
        DescriptionError: the data set's description could run code or leads out of its folder.
        PixelError, ChatError, FileNotFoundError: as their readers raise them.
    """
    facts = facts or read_description(location(data.path)).facts(split)
    samples = facts.samples
    workers = max(data.num_workers, 1)
    if samples is not None and samples < dp_size * workers:
        raise LoaderError(
            f"{data.path}: {samples} samples in {split}, but {dp_size} data-parallel ranks x {workers}"
            f" workers need at least {dp_size * workers}; lower data.num_workers or the number of ranks, or"
            " add samples"
        )

    # Workers are forked, which the tokenizer's own threads would not survive.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    encoder = RowEncoder(data, spec, hf_dir)
    encoder.most_refused = max(MOST_REFUSED_IN_A_ROW, 3 * facts.largest_shard)
    _check_patches(encoder.settings, spec, hf_dir)

    config = WorkerConfig(
        rank=dp_rank,
        world_size=dp_size,
        num_workers=data.num_workers,
        seed_offset=data.seed,
        # An error that is not ours ends the run. Energon's default would print it and continue.
        global_error_handler=reraise_exception,
    )

    dataset = _dataset(data, encoder, config, split)
    # Energon keeps a state after every row, so that no rows must be read again after a save.
    loader = get_savable_loader(
        dataset,
        checkpoint_every_sec=0,
        checkpoint_every_min_n_samples=1,
        n_checkpoints=4 * workers + 4,
        watchdog_timeout_seconds=None,
    )

    allow_early_saves(loader)

    # Rows are pinned where they are sent from. Energon offers no option for this.
    loader.pin_memory = False

    identity = {
        "version": STATE_VERSION,
        "dataset": facts.identity,
        "split": split,
        "dp_rank": dp_rank,
        "dp_size": dp_size,
        "num_workers": data.num_workers,
        "seed": data.seed,
        "seq_len": data.seq_len,
        "pack": data.pack,
        "packing_buffer": data.packing_buffer,
        "shuffle_buffer": data.shuffle_buffer,
        # Without a buffer there is nothing to bound.
        **({"shuffle_buffer_gib": data.shuffle_buffer_gib} if data.shuffle_buffer > 1 else {}),
        "max_patches": data.max_patches,
        # These determine the lengths of samples, and so the rows.
        "pixels": [getattr(encoder.settings, name) for name in PIXEL_FIELDS],
        "chat_template": zlib.crc32(encoder.chat.template.encode()),
        **video_rule(data, spec.vision.video_timestamps),
        **(dataclasses.asdict(encoder.chat.thinking) if encoder.chat.writes_thinking else {}),
    }

    notes = [_buffer_note(data, facts.sample_bytes)] if split == "train" and data.shuffle_buffer > 1 else []
    return RowLoader(loader, identity, facts, notes)


def _buffer_note(data: DataConfig, sample_bytes: float) -> str:
    """A note on the memory that the shuffle buffers of a rank may take."""
    workers = max(data.num_workers, 1)
    bound = data.shuffle_buffer_gib
    samples, gib = at_most(data.shuffle_buffer, bound, sample_bytes)
    expected = f"{samples} samples"
    if sample_bytes:
        expected = f"about {gib:.2f} GiB ({samples} samples of {sample_bytes / 1e6:.2f} MB)"
    most = "without a limit in bytes"
    if bound:
        most = f"at most {bound:g} GiB a worker and {bound * workers:g} GiB a rank"
    return (
        f"shuffle buffer: {expected} in each of {workers} workers of each data-parallel rank, {most} "
        "(data.shuffle_buffer, data.shuffle_buffer_gib)"
    )


def _dataset(data: DataConfig, encoder: RowEncoder, config: WorkerConfig, split: str) -> Any:
    buffer = data.packing_buffer if data.pack else 1
    common: dict[str, Any] = {
        "worker_config": config,
        "task_encoder": encoder,
        "batch_size": None,
        "packing_buffer_size": buffer,
    }
    if split != "train":
        return get_val_dataset(data.path, split_part=split, **common)

    encoder.shuffles = True
    order: dict[str, int | None] = {"shuffle_buffer_size": None}  # RowEncoder.build_encode_sample has its own
    if data.shuffle_buffer > 0:
        order |= {"shuffle_over_epochs_multiplier": 1, "max_samples_per_sequence": 100}
    else:  # by default Energon reads from 16 places of a data set in turn
        order |= {
            "shuffle_over_epochs_multiplier": None,
            "max_samples_per_sequence": None,
            "parallel_shard_iters": 1,
        }

    return get_train_dataset(data.path, split_part=split, **order, **common)


def _check_patches(settings: PixelSettings, spec: ModelSpec, hf_dir: str | Path) -> None:
    vision = spec.vision
    ours = (settings.patch_size, settings.merge_size, settings.temporal_patch_size)
    model = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    if ours != model:
        raise LoaderError(
            f"{hf_dir}: patch, merge and temporal patch size are {ours} in the image processor, {model} in"
            " config.json"
        )
