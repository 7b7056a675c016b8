"""``megatron-vl data``: converts conversation files into data sets, verifies them, and shows what they
hold."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vl.errors import UsageError
from megatron_vl.words import counted

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
    from data_tools.parts import Part
    from data_tools.preview import Preview
    from data_tools.sample_sizes import IndexedPart

MOST_SHOWN = 10
"""Number of ignored keys that the summary names per location; report.json lists all."""
INSTEAD = {
    "min_pixels": "data.min_pixels of the run applies",
    "max_pixels": "data.max_pixels of the run applies, data.video_max_pixels for videos",
    "fps": "data.video_fps of the run applies",
    "nframes": "data.video_fps and data.video_max_frames of the run apply",
    "max_frames": "data.video_max_frames of the run applies",
    "video_start": "the whole video is used",
    "video_end": "the whole video is used",
}
"""The setting that applies instead of an ignored key."""
TOO_MANY_QUARANTINED = 3
"""Exit code. 1 means failure, 2 an invalid command line."""


def convert(given: DataConvertOptions) -> int:
    """Converts conversations into a data set. Returns the exit code."""
    from data_tools.convert import ConversionOptions, convert, default_workers

    options = ConversionOptions(
        media_root=given.media_root,
        out=given.out,
        workers=given.workers if given.workers is not None else default_workers(),
        val_fraction=given.val_fraction,
        samples_per_shard=given.samples_per_shard,
        bytes_per_shard=given.shard_mb << 20,
        max_pixels=int(given.max_megapixels * 1e6),
        format=given.format or "",
        duplicate_ids=given.duplicate_ids,
        force=given.force,
        datasets=given.dataset,
        part=_part(given.shard),
    )
    if given.dry_run:
        return _preview(given, options)

    report = convert(given.input, options, _show)
    if options.part is not None:
        _print_part(report, given, str(options.part))
        return 0
    code = _report(report, given, given.val_fraction)
    if given.processor is None:
        return code
    return _index_converted(given, options.workers) or code


def _index_converted(given: DataConvertOptions, workers: int) -> int:
    """Writes the sizes of all samples. Returns the exit code: a checkpoint may not be able to use them."""
    from data_tools.sample_sizes import index
    from megatron_vl.config import DataConfig
    from megatron_vl.data.source.bad_samples import NOT_IN_TEMPLATE, TEMPLATE_ADVICE
    from megatron_vl.spec.families import read_spec

    assert given.processor is not None
    (found,) = index(DataConfig(path=str(given.out)), read_spec(given.processor), given.processor, workers)
    if not given.json:
        print(f"  sizes of {found.samples} samples for {given.processor} ({found.bytes / 2**20:.2f} MiB)")
    if found.unusable <= given.max_quarantined * found.samples:
        return 0
    advice = f": {TEMPLATE_ADVICE}" if NOT_IN_TEMPLATE in found.reasons else ""
    print(
        f"megatron-vl data: training {given.processor} would leave out {found.unusable} of {found.samples}"
        f" samples{_in_words(found.reasons)}, more than --max-quarantined {given.max_quarantined:g}"
        f" allows{advice}",
        file=sys.stderr,
    )
    return TOO_MANY_QUARANTINED


def _in_words(reasons: dict[str, int]) -> str:
    """Why samples are unusable, the most frequent reason first."""
    counts = Counter(reasons).most_common()
    return f" ({', '.join(f'{count} {reason}' for reason, count in counts)})" if counts else ""


def merge(given: DataMergeOptions) -> int:
    """Writes the data set whose parts are verified. Returns the exit code."""
    from data_tools.convert import convert, default_workers, finished, remembered

    done = finished(given.out)  # a job may be queued again after its work
    if done is not None:
        return _report(done, given, 0.0)
    workers = given.workers if given.workers is not None else default_workers()
    inputs, options = remembered(given.out, workers)
    return _report(convert(inputs, options, _show), given, options.val_fraction)


def _part(text: str | None) -> Part | None:
    """The part that ``I/N`` names. Raises UsageError if it names none."""
    from data_tools.parts import Part

    if text is None:
        return None
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UsageError(f"--shard {text} must be I/N with I from 0 to N - 1, for instance 0/8")
    return Part(int(index), int(count))


def _preview(given: DataConvertOptions, options: ConversionOptions) -> int:
    """Prints what is understood of the first records. Returns 1 if no record can be used."""
    from data_tools.preview import preview

    found = preview(given.input, options)
    if given.json:
        print(json.dumps([file.as_json() for file in found]))
    else:
        print("\n".join(line for file in found for line in _described(file)))
        refused = sum(file.refused.total() for file in found)
        if refused > given.max_quarantined * sum(file.records for file in found):
            print(
                f"NOTE: {refused} of these records cannot be used, more than --max-quarantined"
                f" {given.max_quarantined:g} allows; the conversion would end with exit code 3"
            )
    return 0 if any(file.samples for file in found) else 1


def _described(file: Preview) -> list[str]:
    def listed(counts: Counter[str]) -> str:
        return ", ".join(f"{name} {count}" for name, count in counts.most_common(MOST_SHOWN)) or "none"

    lines = [
        f"{file.file}: {file.samples} of the first {file.records} records can be used",
        f"  format   {listed(file.formats)}",
        f"  turns    {listed(file.roles)}",
        f"  media    {listed(file.media)}",
        f"  tokens   about {file.tokens // max(file.samples, 1)} a sample",
    ]
    if file.features:
        lines.append(f"  with     {listed(file.features)}")
    if file.ignored:
        lines.append(f"  ignored  {listed(file.ignored)}")
    if file.refused:
        lines.append(f"  would be quarantined: {listed(file.refused)}")
        lines += [f"    {example}" for example in file.examples]
    lines += [f"  NOTE: {note}" for note in file.notes]
    if file.first:
        lines += ["  the first sample:", *(f"    {turn}" for turn in file.first)]
    return lines


def _print_part(report: DataReport, given: DataConvertOptions, part: str) -> None:
    if given.json:
        print(json.dumps({"part": part, "records": report.records, "refused": report.refused}))
        return
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(
        f"part {part}: {report.records} records verified in {report.seconds:.1f} s, {report.quarantined} "
        f"cannot be used; when all parts are done: megatron-vl data merge {given.out}"
    )


def _report(report: DataReport, given: DataConvertOptions | DataMergeOptions, val_fraction: float) -> int:
    """Prints the results of a conversion. Returns the exit code."""
    from data_tools.convert import ConvertError

    quarantine = given.out / "quarantine.jsonl"
    if given.json:
        print(
            json.dumps(report.as_json() | {"quarantined": report.quarantined, "quarantine": str(quarantine)})
        )
    else:
        _print(report, given.out, quarantine)

    if not report.records:
        raise ConvertError("the inputs hold no record")
    if not report.samples:
        raise ConvertError(
            f"none of {report.records} records can be used{_first_refusal(quarantine)}; see {quarantine}"
        )
    if val_fraction and not report.val:
        raise ConvertError(
            f"{report.samples} sample is too few for a validation split; "
            "give more, or leave out --val-fraction"
        )

    if report.quarantined > given.max_quarantined * report.records:
        share = report.quarantined / report.records
        print(
            f"megatron-vl data: {report.quarantined} of {report.records} records ({share:.2%}) were "
            f"quarantined, more than --max-quarantined {given.max_quarantined:g} allows; "
            f"{given.out} is complete without them. "
            f"Correct what {quarantine} names and convert again with --force, or allow more",
            file=sys.stderr,
        )
        return TOO_MANY_QUARANTINED

    return 0


def _first_refusal(quarantine: Path) -> str:
    """Why the first record was refused. A wrong media root or format refuses all records for one reason."""
    with quarantine.open(encoding="utf-8") as lines:
        entry = json.loads(next(lines, "null"))
    return f" (record {entry['record']}, {entry['reason']}: {entry['detail']})" if entry else ""


def verify(options: DataVerifyOptions) -> int:
    """Compares every shard of a data set with its size and hash. Returns 1 if one differs."""
    from data_tools.verify import verify

    shards, problems = verify(options.dataset, _show)
    _end_line()
    if options.json:
        print(json.dumps({"shards": shards, "problems": problems}))
    else:
        print(
            "\n".join(problems)
            or f"{counted(shards, 'shard')} of {options.dataset} {'is' if shards == 1 else 'are'} intact"
        )
    return 1 if problems else 0


def index(options: DataIndexOptions) -> int:
    """Writes the sizes of a data set's samples."""
    from data_tools.convert import default_workers
    from data_tools.sample_sizes import index, index_part

    from .prepared import open_prepared

    part = _part(options.shard)
    prepared = open_prepared(options)
    workers = options.workers if options.workers is not None else default_workers()
    given = prepared.config.data, prepared.spec, prepared.processor
    if part is not None:
        measured = index_part(*given, part, workers, _show)
        _end_line()
        return _print_measured(measured, options)

    found = index(*given, workers, _show)
    _end_line()
    if options.json:
        print(json.dumps([one.as_json() for one in found]))
        return 0
    for one in found:
        unusable = f", {one.unusable} of them unusable{_in_words(one.reasons)}," if one.unusable else ""
        took = f"in {one.seconds:.1f} s" if one.seconds else "were there"
        print(
            f"{one.path}: sizes of {one.samples} samples{unusable} and {one.media} media"
            f" ({one.bytes / 2**20:.2f} MiB) {took}"
        )
    return 0


def _print_measured(measured: list[IndexedPart], options: DataIndexOptions) -> int:
    if options.json:
        print(json.dumps([one.as_json() for one in measured]))
        return 0
    for one in measured:
        if one.joined:
            print(f"{one.path}: the sizes were there")
            continue
        print(f"{one.path}: {counted(one.measured, 'shard')} of part {options.shard} in {one.seconds:.1f} s")
        print(
            f"  {counted(one.left, 'shard')} of other parts left"
            if one.left
            else "  all shards are measured: run the command without --shard to join them"
        )
    return 0


def stats(options: DataStatsOptions) -> int:
    """Prints what a data set holds, and writes its page."""
    from .page import write_stats
    from .prepared import open_prepared
    from .stats import as_json, print_stats

    prepared = open_prepared(options)
    found = prepared.statistics(_show)
    _end_line()
    if options.json:
        print(json.dumps(as_json(prepared, found), indent=2))
    else:
        print_stats(prepared, found)
    if options.html:
        write_stats(prepared, found, options.shown, options.html)
    return 0


def inspect(options: DataInspectOptions) -> int:
    """Prints one sample, and writes its page. Returns 1 if the loader would leave it out."""
    from .page import write_sample
    from .prepared import open_prepared
    from .sample import as_json, find, print_sample, view

    prepared = open_prepared(options)
    sample = view(prepared, *find(prepared, options.index, options.key))
    if options.json:
        print(json.dumps(as_json(sample), indent=2))
    else:
        print_sample(sample)
    if options.html:
        write_sample(prepared, sample, options.html)
    return 1 if sample.problem else 0


def _end_line() -> None:
    """Removes the line of progress."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)


def _show(line: str) -> None:
    print(
        f"\r{line}\033[K" if sys.stderr.isatty() else line,
        end="" if sys.stderr.isatty() else "\n",
        file=sys.stderr,
        flush=True,
    )


def _print(report: DataReport, out: Path, quarantine: Path) -> None:
    from data_tools.media import ASSUMED_FPS

    _end_line()
    reasons: Counter[str] = Counter()
    for counts in report.refused.values():
        reasons.update(counts)
    why = ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
    end = f" ({why}), listed in {quarantine}" if why else ""
    done = f"written to {out} in {report.seconds:.1f} s"
    if report.was_complete:
        done = f"are in {out} already, which is complete: nothing was written (--force starts over)"
    print(f"{report.samples} of {report.records} records {done}, {report.quarantined} quarantined{end}")
    print(f"  train {report.train}, val {report.val}, images {report.images}, videos {report.videos}")
    print(f"  {counted(report.shards, 'shard')}, {report.bytes / 2**20:.1f} MiB")

    for location, found in report.ignored.items():
        print(f"  ignored: {_ignored(location, found)}")
    if report.answer_media:
        print(
            f"  {report.answer_media} images or videos in the assistant's turns: "
            "the model sees them but does not learn them"
        )

    if report.assumed_fps:
        print(
            f"  {report.assumed_fps} videos are pictures whose rate no record names: "
            f"{ASSUMED_FPS:g} a second are assumed"
        )

    if len(report.refused) > 1:
        for file, counts in report.refused.items():
            for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
                print(f"  quarantined {count:6d}  {reason}  ({file})")


def _ignored(location: str, counts: dict[str, int]) -> str:
    """The ignored keys of a location, the most frequent first, each with the setting that applies instead."""
    shown = sorted(counts.items(), key=lambda item: -item[1])[:MOST_SHOWN]
    unit = {1: location.removesuffix("s")}
    told = {key: f" ({text})" for key, text in INSTEAD.items()}
    texts = [
        f"{key if key.isprintable() else ascii(key)} in {n} {unit.get(n, location)}{told.get(key, '')}"
        for key, n in shown
    ]
    more = len(counts) - len(shown)
    return ", ".join(texts) + (f", and {more} more keys (see report.json)" if more else "")
