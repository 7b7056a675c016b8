"""The loader: reads shards written by ``megatron-vl data convert`` with Energon and packs rows.

Which samples share a row of training is planned before they are read
(:mod:`megatron_vl.data.planned_rows`), and :class:`~megatron_vl.data.row_encoder.RowEncoder` makes the row.
One loader serves a data-parallel replica.

Rows of validation are packed in the data set's order. A validation pass ends, so samples that are dropped
after its last row are only logged: no later row could count them.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_vl.config import DataConfig
from megatron_vl.data import planned_rows
from megatron_vl.data.packing.fill_row import choose_row_samples, pack_first_fit
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.planned_rows import PlanningContext
from megatron_vl.data.row_encoder import RawSample, RowEncoder, cook_sample
from megatron_vl.data.row_loader import PIXEL_FIELDS, PROCESSOR_PREFIX, STATE_VERSION, RowLoader
from megatron_vl.data.source.blend import BlendSource
from megatron_vl.data.source.dataset_description import SplitFacts, read_description
from megatron_vl.data.source.energon_datasets import SplitShards, load_datasets, open_sample_reader
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.sample_sizes import compute_tokenization_id
from megatron_vl.data.source.store_reading import ReadAhead
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.families.hf_folder import compute_template_digest, compute_tokenizer_digest

READ_AHEAD = 256
"""Number of samples of a validation split that are read ahead from an object store."""
READ_TOGETHER = 16
"""Number of samples of a validation split that are read with one request."""


def build_loader(
    data_config: DataConfig,
    spec: ModelSpec,
    hf_dir: str | Path,
    *,
    dp_rank: int = 0,
    dp: int = 1,
    split_facts: SplitFacts | None = None,
    rows_per_step: int = 0,
    epochs: int = 0,
) -> RowLoader:
    """The loader of data-parallel rank ``dp_rank``. It gives rows of the split ``train``.

    Args:
        data_config: the data set, and how rows are made from it.
        hf_dir: folder of the tokenizer, chat template and image processor.
        split_facts: facts of the split, if another rank has read and checked the description. If they are
            None, this function reads it.
        rows_per_step: number of rows of a step on all ranks, a multiple of ``dp``; 0: one row on each
            rank. A state can be saved between steps.
        epochs: number of passes over the data; 0: the rows never end.

    Raises:
        LoaderError: the folder is not a data set; the split or a drawn source of it is empty, or has no sizes
            for this tokenizer and chat template; or its description could run code or leads elsewhere.
        PixelError, ChatError, FileNotFoundError: as their readers raise them.
    """
    split_facts = split_facts or read_description(data_config.path).split_facts("train")
    # Workers are forked, which the tokenizer's own threads would not survive.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    row_encoder = _make_row_encoder(data_config, spec, hf_dir)
    blend_sources, datasets = load_datasets(split_facts)
    if empty_sources := [s.source_name for s in blend_sources if s.sample_share and not s.sample_count]:
        raise LoaderError(f"{data_config.path}: {', '.join(empty_sources)} has no samples; leave it out")
    if len(blend_sources) > 1:
        row_encoder.source_names = tuple(source.source_name for source in blend_sources)

    tokenization_id = compute_tokenization_id(hf_dir, spec, data_config)
    planning_context = PlanningContext(
        datasets, blend_sources, tokenization_id, row_encoder, rows_per_step or dp, epochs
    )
    identity = _loader_identity(data_config, row_encoder, split_facts)
    return RowLoader(planning_context, identity, dp_rank, dp, data_config)


def _loader_identity(
    data_config: DataConfig, row_encoder: RowEncoder, split_facts: SplitFacts
) -> dict[str, Any]:
    """The settings that determine the rows, as JSON values. A state is valid only with the same ones."""
    chat_encoder = row_encoder.chat_encoder
    pixel_settings = json.loads(json.dumps(dataclasses.asdict(row_encoder.pixel_settings)))
    identity = {
        "version": STATE_VERSION,
        "dataset": split_facts.dataset_identity,
        "seed": data_config.seed,
        "seq_len": data_config.seq_len,
        "shuffle": data_config.shuffle,
        "pack": data_config.pack,
        "max_patches": data_config.max_patches,
        "too_long": data_config.too_long,
        # These determine the lengths of samples, and so the rows.
        "pixels": [pixel_settings.pop(name) for name in PIXEL_FIELDS],
        "chat_template": compute_template_digest(chat_encoder.chat_template),
        "template_arguments": data_config.template_arguments,
        "tokenizer": compute_tokenizer_digest(chat_encoder.tokenizer.backend_tokenizer),
        # Those that come from the processor's files, such as processor.patch_size.
        **{f"{PROCESSOR_PREFIX}{name}": value for name, value in pixel_settings.items()},
    }
    if chat_encoder.template_writes_thinking:
        identity |= {name: getattr(data_config, name) for name in ("empty_think", "earlier_answers")}
    return identity


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
    row_encoder = _make_row_encoder(data_config, spec, hf_dir)
    buffer_size = planned_rows.PACKING_BUFFER if data_config.pack else 1
    limits = (data_config.seq_len, data_config.max_patches)
    waiting: list[RawSample] = []
    waiting_tokens = 0
    for sample in _samples_in_order(row_encoder, *load_datasets(split_facts)):
        waiting.append(sample)
        waiting_tokens += 0 if sample.refused else len(sample.token_ids)
        # A long row has room for more samples.
        if len(waiting) < buffer_size or data_config.pack and waiting_tokens < data_config.seq_len:
            continue
        if waiting := row_encoder.usable_samples(waiting):
            chosen = choose_row_samples([one.token_and_patch_count for one in waiting], *limits)
            yield row_encoder.make_row([waiting[i] for i in chosen])
            waiting = [waiting[i] for i in sorted({*range(len(waiting))}.difference(chosen))]
        waiting_tokens = sum(len(one.token_ids) for one in waiting)

    waiting = row_encoder.usable_samples(waiting)
    for chosen in pack_first_fit([one.token_and_patch_count for one in waiting], *limits):
        yield row_encoder.make_row([waiting[i] for i in chosen])


def _samples_in_order(
    row_encoder: RowEncoder, blend_sources: Sequence[BlendSource], datasets: Sequence[SplitShards]
) -> Iterator[RawSample]:
    """All samples of all sources, and the parts of those that are cut, one after the other."""
    for source, dataset in zip(blend_sources, datasets, strict=True):
        read_ahead = ReadAhead([dataset], READ_TOGETHER, block_count=1, rank_count=1)
        reader = open_sample_reader(dataset, partial(read_ahead.take, 0))
        for index in range(source.sample_count):
            if index % READ_AHEAD == 0:
                read_ahead.expect((0, i) for i in range(source.sample_count)[index : index + READ_AHEAD])
            sample = row_encoder.preencode_sample(cook_sample(reader[index]))
            for part_index in range(len(sample.parts) or 1):
                yield row_encoder.sample_part(sample, part_index)


def _make_row_encoder(data_config: DataConfig, spec: ModelSpec, hf_dir: str | Path) -> RowEncoder:
    row_encoder = RowEncoder(data_config, spec, hf_dir)
    pixels, vision = row_encoder.pixel_settings, spec.vision
    processor_sizes = (pixels.patch_size, pixels.merge_size, pixels.temporal_patch_size)
    model_sizes = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    if processor_sizes != model_sizes:
        raise LoaderError(
            f"{hf_dir}: patch, merge and temporal patch size are {processor_sizes} in the image processor,"
            f" {model_sizes} in config.json"
        )
    return row_encoder
