"""``megatron-vl data``: converts conversation files into data sets, indexes and describes them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vl.config import TrainConfig, parse_config
from megatron_vl.data.source.location import check_data_path
from megatron_vl.system.errors import UsageError
from megatron_vl.system.plurals import pluralize
from megatron_vl.system.processes import available_cores
from toolkit.common.record_options import ignored_keys_text

from .options import DataConvertOptions, DataIndexOptions, DataShowOptions

if TYPE_CHECKING:
    from data_tools.convert import DataReport
    from megatron_vl.spec.families import ModelSpec


def convert(command_options: DataConvertOptions) -> int:
    for path in command_options.input:  # before torch is imported
        if not path.exists() and not path.name.startswith("dataset_info.json:"):
            raise FileNotFoundError(f"--input {path} does not exist")
    from data_tools.convert import ConvertError, convert_dataset, first_refusal

    conversion_options = command_options.conversion_options(
        command_options.input,
        command_options.out,
        command_options.workers,
        format=command_options.format or "",
        duplicate_ids=command_options.duplicate_ids,
        part=command_options.part_numbers(),
    )
    report = convert_dataset(command_options.input, conversion_options)
    dataset_dir = conversion_options.dataset_dir
    quarantine_path = dataset_dir / "quarantine.jsonl"
    _print_summary(report, dataset_dir, quarantine_path)

    if not report.samples:
        # A wrong media root or format refuses all records for one reason.
        raise ConvertError(
            f"none of {report.records} records can be used ({first_refusal(dataset_dir)}); see"
            f" {quarantine_path}, correct them and convert again"
        )
    if report.quarantined_records > command_options.max_quarantined * report.records:
        print(
            f"megatron-vl data: {report.quarantined_records} of {report.records} records "
            f"({report.quarantined_records / report.records:.2%}) were quarantined, more than "
            f"--max-quarantined {command_options.max_quarantined:g} allows; {dataset_dir} is complete without"
            f" them. Correct what {quarantine_path} names, remove {dataset_dir} and convert again, or allow"
            " more",
            file=sys.stderr,
        )
        return 3  # 1 means failure, 2 an invalid command line
    return 0


def _print_summary(report: DataReport, dataset_dir: Path, quarantine_path: Path) -> None:
    from data_tools.media import ASSUMED_FPS

    reasons: Counter[str] = sum(map(Counter, report.refused.values()), Counter())
    reasons_text = ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
    quarantine_text = f" ({reasons_text}), listed in {quarantine_path}" if reasons_text else ""
    print(
        f"{report.samples} of {report.records} records written to {dataset_dir}, "
        f"{report.quarantined_records} quarantined{quarantine_text}"
    )
    print(f"  train {report.train}, val {report.val}, images {report.images}, videos {report.videos}")
    print(f"  {pluralize(report.shards, 'shard')}, {report.bytes / 2**20:.1f} MiB")
    for key_location, key_counts in report.ignored.items():
        print(f"  {ignored_keys_text(key_location, key_counts)}")
    notes = {
        "images or videos in the assistant's turns: the model sees them but is not trained on them": (
            report.answer_media
        ),
        f"text{'s' * (report.unsaid_boxes != 1)} with boxes whose frame of reference is not said: trained"
        " on as written; give the records 'boxes' or 'objects'": report.unsaid_boxes,
        "turns after the last answer of their conversation are left out": report.unfinished_turns,
        "images are animated or have several pages: only the first is used": report.first_images,
        f"videos without a frame rate: {ASSUMED_FPS:g} a second are assumed for images, 25 for files": (
            report.assumed_fps
        ),
    }
    for text, count in notes.items():
        if count:
            print(f"  {count} {text}")


def _read_run(run_args: list[str], new_dataset: Path | None = None) -> TrainConfig:
    """The run whose data set is read, or written. Raises UsageError or RunConfigError, before torch is
    imported, if fields are missing or wrong."""
    config = parse_config([*run_args, *(["--data.path", str(new_dataset)] if new_dataset else [])])
    given = {"data.path": config.data.path, "model.hf": config.model.hf}
    if missing := [f"--{name}" for name, value in given.items() if not value]:
        raise UsageError(f"give {' and '.join(missing)}, or a run with --config")
    if not new_dataset:
        check_data_path(config.data.path)
    return config


def index(options: DataIndexOptions) -> int:
    config = _read_run(options.fields, options.out)
    from data_tools.sample_sizes import index_datasets
    from megatron_vl.spec.families import read_spec

    spec = read_spec(config.model.hf)
    num_workers = options.workers if options.workers is not None else available_cores()
    if options.out is not None:
        _index_tars(options, config, spec, num_workers)
    for result in index_datasets(config.data, spec, config.model.hf, num_workers):
        reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(result.reasons).most_common())
        unusable_text = f", {result.unusable} of them unusable ({reasons})," if result.unusable else ""
        print(
            f"{result.path}: sizes of {result.samples} samples{unusable_text} and "
            f"{result.media} media ({result.bytes / 2**20:.2f} MiB)",
            f"in {result.seconds:.1f} s" if result.seconds else "were there",
        )
    return 0


def _index_tars(options: DataIndexOptions, config: TrainConfig, spec: ModelSpec, num_workers: int) -> None:
    from data_tools.sample_sources import open_encoder
    from data_tools.tar_index import TarIndex, find_tars, index_tars
    from megatron_vl.data.source.sample_sizes import compute_tokenization_id
    from megatron_vl.data.source.tar_list import parse_fields

    assert options.out is not None
    fields = parse_fields(options.members)
    tar_index = TarIndex(
        *find_tars(options.input),
        options.out,
        fields,
        open_encoder(config.data, spec, config.model.hf),
        compute_tokenization_id(config.model.hf, spec, config.data),
    )
    report = index_tars(tar_index, num_workers)
    broken = ", ".join(f"{count} {reason}" for reason, count in report.broken.most_common())
    listed = f"; no usable pair: {broken}, listed in {options.out / 'quarantine.jsonl'}" if broken else ""
    read_text = f"{pluralize(len(tar_index.names), 'tar')}, {report.read_tars} of them read now"
    print(f"{options.out}: {report.pairs} {'pairs' if fields.image else 'texts'} in {read_text}{listed}")


def show(options: DataShowOptions) -> int:
    config = _read_run(options.fields)
    from data_tools.sample_sizes import index_datasets
    from data_tools.sample_sources import list_splits, open_encoder
    from data_tools.statistics import count_statistics
    from megatron_vl.spec.families import read_spec

    from .page import write_page
    from .sample_view import find_sample, print_sample, view_sample
    from .statistics import dataset_facts, print_facts

    encoder = open_encoder(config.data, read_spec(config.model.hf), config.model.hf)
    if options.sample is not None:
        sample = view_sample(encoder, *find_sample(config.data.path, options.sample))
        if options.json:
            print(json.dumps({name: fact for name, fact in vars(sample).items() if name != "pixels"}))
        else:
            print_sample(sample)
        if options.html:
            write_page(encoder, options.html, {"quarantined": {}}, {}, [sample])
        return 1 if sample.problem else 0

    index_datasets(config.data, encoder.spec, config.model.hf, available_cores())  # what has no sizes yet
    statistics = {
        split: count_statistics(encoder, config.model.hf, split) for split in list_splits(config.data.path)
    }
    facts = dataset_facts(config, statistics)
    if options.json:
        print(json.dumps(facts))
    else:
        print_facts(facts)
    if options.html:
        write_page(encoder, options.html, facts, statistics, [])
    return 0
