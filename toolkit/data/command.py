"""``megatron-vl data``: converts conversation files into data sets, verifies and describes them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vl.errors import UsageError
from megatron_vl.plurals import pluralize

from .options import (
    DataConvertOptions,
    DataIndexOptions,
    DataInspectOptions,
    DataMergeOptions,
    DataStatsOptions,
    DataVerifyOptions,
)

if TYPE_CHECKING:
    from data_tools.convert import ConversionOptions, DataReport
    from data_tools.preview import FilePreview
    from data_tools.work_parts import WorkPart

MAX_SHOWN_KEYS = 10
"""Number of ignored keys that the summary names per location; report.json lists all."""
SETTING_BY_IGNORED_KEY = {
    "min_pixels": "data.min_pixels of the run applies",
    "max_pixels": "data.max_pixels of the run applies, data.video_max_pixels for videos",
    "fps": "data.video_fps of the run applies",
    "nframes": "data.video_fps and data.video_max_frames of the run apply",
    "max_frames": "data.video_max_frames of the run applies",
    "start": "no video is cut",
    "end": "no video is cut",
}
"""The setting that applies instead of an ignored key."""
TOO_MANY_QUARANTINED = 3
"""Exit code. 1 means failure, 2 an invalid command line."""


def convert(command_options: DataConvertOptions) -> int:
    """Converts conversations into a data set. Returns the exit code."""
    from data_tools.convert import ConversionOptions, convert_dataset, default_workers

    conversion_options = ConversionOptions(
        media_root=command_options.media_root,
        out=command_options.out,
        workers=command_options.workers if command_options.workers is not None else default_workers(),
        val_fraction=command_options.val_fraction,
        samples_per_shard=command_options.samples_per_shard,
        bytes_per_shard=command_options.shard_mb << 20,
        max_pixels=int(command_options.max_megapixels * 1e6),
        format=command_options.format or "",
        duplicate_ids=command_options.duplicate_ids,
        force=command_options.force,
        datasets=command_options.dataset,
        part=_parse_part(command_options.shard),
    )
    if command_options.dry_run:
        return _print_preview(command_options, conversion_options)

    report = convert_dataset(command_options.input, conversion_options, _show_progress)
    if conversion_options.part is not None:
        _print_part_report(report, command_options, str(conversion_options.part))
        return 0
    exit_code = _report_conversion(report, command_options, command_options.val_fraction)
    if command_options.processor is None:
        return exit_code
    return _index_converted(command_options, conversion_options.workers) or exit_code


def _index_converted(options: DataConvertOptions, num_workers: int) -> int:
    """Writes the sizes of all samples. Returns the exit code: a checkpoint may not be able to use them."""
    from data_tools.sample_sizes import index_datasets
    from megatron_vl.config import DataConfig
    from megatron_vl.data.source.bad_samples import NOT_IN_CHAT_TEMPLATE, TEMPLATE_ADVICE
    from megatron_vl.spec.families import read_spec

    assert options.processor is not None
    (index_result,) = index_datasets(
        DataConfig(path=str(options.out)), read_spec(options.processor), options.processor, num_workers
    )
    if not options.json:
        print(
            f"  sizes of {index_result.samples} samples for "
            f"{options.processor} ({index_result.bytes / 2**20:.2f} MiB)"
        )
    if index_result.unusable <= options.max_quarantined * index_result.samples:
        return 0
    advice = f": {TEMPLATE_ADVICE}" if NOT_IN_CHAT_TEMPLATE in index_result.reasons else ""
    print(
        f"megatron-vl data: training {options.processor} would leave out {index_result.unusable} "
        f"of {index_result.samples} samples{_reasons_text(index_result.reasons)}, more than "
        f"--max-quarantined {options.max_quarantined:g} allows{advice}",
        file=sys.stderr,
    )
    return TOO_MANY_QUARANTINED


def _reasons_text(reasons: dict[str, int]) -> str:
    """Why samples are unusable, the most frequent reason first."""
    reason_texts = [f"{count} {reason}" for reason, count in Counter(reasons).most_common()]
    return f" ({', '.join(reason_texts)})" if reason_texts else ""


def merge(command_options: DataMergeOptions) -> int:
    """Writes the data set whose parts are verified. Returns the exit code."""
    from data_tools.convert import convert_dataset, default_workers, finished_report, read_part_arguments

    complete_report = finished_report(command_options.out)  # a job may be queued again after its work
    if complete_report is not None:
        return _report_conversion(complete_report, command_options, 0.0)
    num_workers = command_options.workers if command_options.workers is not None else default_workers()
    input_paths, options = read_part_arguments(command_options.out, num_workers)
    return _report_conversion(
        convert_dataset(input_paths, options, _show_progress), command_options, options.val_fraction
    )


def _parse_part(part_text: str | None) -> WorkPart | None:
    """The part that ``I/N`` names. Raises UsageError if it names none."""
    from data_tools.work_parts import WorkPart

    if part_text is None:
        return None
    index, _, count = part_text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UsageError(f"--shard {part_text} must be I/N with I from 0 to N - 1, for instance 0/8")
    return WorkPart(int(index), int(count))


def _print_preview(command_options: DataConvertOptions, conversion_options: ConversionOptions) -> int:
    """Prints what is understood of the first records. Returns the exit code of a conversion of them."""
    from data_tools.preview import preview_files

    file_previews = preview_files(command_options.input, conversion_options)
    num_records = num_refused = num_samples = 0
    for file_preview in file_previews:
        num_records += file_preview.records
        num_refused += file_preview.refused.total()
        num_samples += file_preview.samples

    if command_options.json:
        print(json.dumps([file_preview.as_json() for file_preview in file_previews]))
    else:
        for file_preview in file_previews:
            print("\n".join(_preview_lines(file_preview)))

    if not num_samples:
        return 1
    _check_val_split(num_samples, command_options.val_fraction)
    if num_refused <= command_options.max_quarantined * num_records:
        return 0
    if not command_options.json:
        print(
            f"NOTE: {num_refused} of these records cannot be used, more than --max-quarantined"
            f" {command_options.max_quarantined:g} allows: exit code {TOO_MANY_QUARANTINED}"
        )
    return TOO_MANY_QUARANTINED


def _preview_lines(file_preview: FilePreview) -> list[str]:
    """The lines that describe the first records of a file."""

    def counts_text(counts: Counter[str]) -> str:
        return ", ".join(f"{name} {count}" for name, count in counts.most_common(MAX_SHOWN_KEYS)) or "none"

    preview_lines = [
        f"{file_preview.file}: {file_preview.samples} of the "
        f"first {file_preview.records} records can be used",
        f"  format   {counts_text(file_preview.formats)}",
        f"  turns    {counts_text(file_preview.roles)}",
        f"  media    {counts_text(file_preview.media)}",
        f"  tokens   about {file_preview.tokens // max(file_preview.samples, 1)} a sample",
    ]
    if file_preview.features:
        preview_lines.append(f"  with     {counts_text(file_preview.features)}")
    if file_preview.ignored:
        preview_lines.append(f"  ignored  {counts_text(file_preview.ignored)}")
    if file_preview.refused:
        preview_lines.append(f"  would be quarantined: {counts_text(file_preview.refused)}")
        preview_lines += [f"    {example}" for example in file_preview.examples]
    preview_lines += [f"  NOTE: {note}" for note in file_preview.notes]
    if file_preview.first:
        preview_lines += ["  the first sample:", *(f"    {turn}" for turn in file_preview.first)]
    return preview_lines


def _print_part_report(report: DataReport, options: DataConvertOptions, part_text: str) -> None:
    if options.json:
        print(json.dumps({"part": part_text, "records": report.records, "refused": report.refused}))
        return
    _clear_progress()
    print(
        f"part {part_text}: {report.records} records verified in "
        f"{report.seconds:.1f} s, {report.quarantined_records} cannot be "
        f"used; when all parts are done: megatron-vl data merge {options.out}"
    )


def _report_conversion(
    report: DataReport, options: DataConvertOptions | DataMergeOptions, val_fraction: float
) -> int:
    """Prints the results of a conversion. Returns the exit code."""
    from data_tools.convert import ConvertError

    quarantine_path = options.out / "quarantine.jsonl"
    if options.json:
        quarantine_facts = {"quarantined": report.quarantined_records, "quarantine": str(quarantine_path)}
        print(json.dumps(report.as_json() | quarantine_facts))
    else:
        _print_summary(report, options.out, quarantine_path)

    if not report.records:
        raise ConvertError("the inputs hold no record")
    if not report.samples:
        raise ConvertError(
            f"none of {report.records} records can be "
            f"used{_first_refusal(quarantine_path)}; see {quarantine_path}, and convert again with --force"
        )
    _check_val_split(report.samples, val_fraction)
    if report.quarantined_records > options.max_quarantined * report.records:
        print(
            f"megatron-vl data: {report.quarantined_records} of {report.records} records "
            f"({report.quarantined_records / report.records:.2%}) were quarantined, more than "
            f"--max-quarantined {options.max_quarantined:g} allows; {options.out} is complete without them. "
            f"Correct what {quarantine_path} names and convert again with --force, or allow more",
            file=sys.stderr,
        )
        return TOO_MANY_QUARANTINED
    return 0


def _check_val_split(num_samples: int, val_fraction: float) -> None:
    """Raises ConvertError if there is no second sample for the validation split."""
    from data_tools.convert import ConvertError

    if val_fraction and num_samples == 1:
        raise ConvertError(
            "1 sample is too few for a validation split; give more, or leave out --val-fraction"
        )


def _first_refusal(quarantine_path: Path) -> str:
    """Why the first record was refused. A wrong media root or format refuses all records for one reason."""
    with quarantine_path.open(encoding="utf-8") as lines:
        entry = json.loads(next(lines, "null"))
    return f" (record {entry['record']}, {entry['reason']}: {entry['detail']})" if entry else ""


def verify(options: DataVerifyOptions) -> int:
    """Compares every shard of a data set with its size and hash. Returns 1 if one differs."""
    from data_tools.verify import verify_dataset

    shards, problems = verify_dataset(options.dataset, _show_progress)
    _clear_progress()
    if options.json:
        print(json.dumps({"shards": shards, "problems": problems}))
    else:
        print(
            "\n".join(problems)
            or f"{pluralize(shards, 'shard')} of {options.dataset} {'is' if shards == 1 else 'are'} intact"
        )
    return 1 if problems else 0


def index(options: DataIndexOptions) -> int:
    """Writes the sizes of a data set's samples."""
    from data_tools.convert import default_workers
    from data_tools.sample_sizes import index_datasets

    from .prepared_dataset import open_prepared

    work_part = _parse_part(options.shard)
    prepared = open_prepared(options)
    num_workers = options.workers if options.workers is not None else default_workers()
    index_results = index_datasets(
        prepared.config.data, prepared.spec, prepared.processor_dir, num_workers, _show_progress, work_part
    )
    _clear_progress()
    if options.json:
        print(json.dumps([index_result.as_json() for index_result in index_results]))
        return 0
    for index_result in index_results:
        if index_result.shards_left:
            shards_text = pluralize(index_result.shards_left, "shard")
            print(f"{index_result.path}: {shards_text} of other parts left, in {index_result.seconds:.1f} s")
            continue
        unusable_text = ""
        if index_result.unusable:
            reasons_text = _reasons_text(index_result.reasons)
            unusable_text = f", {index_result.unusable} of them unusable{reasons_text},"
        time_text = f"in {index_result.seconds:.1f} s" if index_result.seconds else "were there"
        print(
            f"{index_result.path}: sizes of {index_result.samples} samples{unusable_text} and "
            f"{index_result.media} media ({index_result.bytes / 2**20:.2f} MiB) {time_text}"
        )
    return 0


def stats(options: DataStatsOptions) -> int:
    """Prints what a data set holds, and writes its page."""
    from data_tools.statistics import count_statistics

    from .page import write_stats
    from .prepared_dataset import open_prepared
    from .stats import print_stats, stats_as_json

    prepared = open_prepared(options)
    statistics = count_statistics(
        prepared.row_encoder, prepared.processor_dir, prepared.split, _show_progress
    )
    _clear_progress()
    if options.json:
        print(json.dumps(stats_as_json(prepared, statistics), indent=2))
    else:
        print_stats(prepared, statistics)
    if options.html:
        write_stats(prepared, statistics, options.shown, options.html)
    return 0


def inspect(options: DataInspectOptions) -> int:
    """Prints one sample, and writes its page. Returns 1 if the loader would leave it out."""
    from .page import write_sample
    from .prepared_dataset import open_prepared
    from .sample_view import find_sample, print_sample, sample_as_json, view_sample

    prepared = open_prepared(options)
    sample = view_sample(prepared, *find_sample(prepared, options.index, options.key))
    if options.json:
        print(json.dumps(sample_as_json(sample), indent=2))
    else:
        print_sample(sample)
    if options.html:
        write_sample(prepared, sample, options.html)
    return 1 if sample.problem else 0


def _clear_progress() -> None:
    """Removes the line of progress."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)


def _show_progress(progress_line: str) -> None:
    print(
        f"\r{progress_line}\033[K" if sys.stderr.isatty() else progress_line,
        end="" if sys.stderr.isatty() else "\n",
        file=sys.stderr,
        flush=True,
    )


def _print_summary(report: DataReport, dataset_dir: Path, quarantine_path: Path) -> None:
    from data_tools.media import ASSUMED_FPS

    _clear_progress()
    reasons: Counter[str] = sum(map(Counter, report.refused.values()), Counter())
    reasons_text = ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
    quarantine_text = f" ({reasons_text}), listed in {quarantine_path}" if reasons_text else ""
    result_text = f"written to {dataset_dir} in {report.seconds:.1f} s"
    if report.was_complete:
        result_text = (
            f"are in {dataset_dir} already: an earlier conversion completed it, perhaps with another"
            " --media-root, and nothing was read or written now (--force builds it anew)"
        )
    print(
        f"{report.samples} of {report.records} records {result_text}, "
        f"{report.quarantined_records} quarantined{quarantine_text}"
    )
    print(f"  train {report.train}, val {report.val}, images {report.images}, videos {report.videos}")
    print(f"  {pluralize(report.shards, 'shard')}, {report.bytes / 2**20:.1f} MiB")

    for key_location, key_counts in report.ignored.items():
        print(f"  ignored: {_ignored_keys_text(key_location, key_counts)}")
    if report.answer_media:
        print(
            f"  {report.answer_media} images or videos in the assistant's turns: "
            "the model sees them but does not learn them"
        )
    if report.first_images:
        print(f"  {report.first_images} images are animated or have several pages: only the first is used")
    if report.assumed_fps:
        print(
            f"  {report.assumed_fps} videos without a frame rate: {ASSUMED_FPS:g} a second are assumed for"
            " pictures, 25 for files"
        )

    if len(report.refused) > 1:
        for file_name, counts in report.refused.items():
            for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
                print(f"  quarantined {count:6d}  {reason}  ({file_name})")


def _ignored_keys_text(key_location: str, counts: dict[str, int]) -> str:
    """The ignored keys of a location, the most frequent first, each with the setting that applies instead."""
    shown_counts = sorted(counts.items(), key=lambda item: -item[1])[:MAX_SHOWN_KEYS]
    location_by_count = {1: key_location.removesuffix("s")}
    setting_texts = {key: f" ({text})" for key, text in SETTING_BY_IGNORED_KEY.items()}

    key_texts = []
    for key, key_count in shown_counts:
        key_texts.append(
            f"{key if key.isprintable() else ascii(key)} in {key_count} "
            f"{location_by_count.get(key_count, key_location)}{setting_texts.get(key, '')}"
        )

    num_unshown = len(counts) - len(shown_counts)
    return ", ".join(key_texts) + (f", and {num_unshown} more keys (see report.json)" if num_unshown else "")
