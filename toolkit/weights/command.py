"""``megatron-vl convert | split | merge | export | verify``: converts weights between all layouts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_vl.errors import UserError
from megatron_vl.words import counted

from .options import (
    ONE_RANK,
    ConvertOptions,
    ExportOptions,
    MergeOptions,
    OutOptions,
    SplitOptions,
    VerifyOptions,
)


def convert(options: ConvertOptions) -> int:
    """Converts Hugging Face weights to Megatron weights."""
    from converters.convert import convert

    how: dict[str, Any] = {"workers": options.workers, "force": options.force}
    return _finish(options, lambda: convert(options.hf, options.out, options.layout, **how))


def split(options: SplitOptions) -> int:
    """Writes Megatron weights in another layout; without a layout, as a single file."""
    from converters.convert import reshard

    layout = options.layout or ONE_RANK
    how: dict[str, Any] = {"workers": options.workers, "force": options.force}
    return _finish(options, lambda: reshard(options.checkpoint, options.out, layout, **how))


def merge(options: MergeOptions) -> int:
    """Merges Megatron weights into unsplit ones."""
    from converters.convert import reshard

    how: dict[str, Any] = {"workers": options.workers, "force": options.force}
    return _finish(options, lambda: reshard(options.checkpoint, options.out, None, **how))


def export(options: ExportOptions) -> int:
    """Exports Megatron weights to a Hugging Face folder."""
    from converters.convert import export

    how: dict[str, Any] = {"workers": options.workers, "force": options.force}
    return _finish(
        options, lambda: export(options.checkpoint, options.hf, options.out, **how), origin=options.hf
    )


def _finish(options: OutOptions, work: Callable[[], Any], origin: Path | None = None) -> int:
    """Runs a conversion and prints a report of what was written.

    Args:
        work: converts and returns a :class:`converters.convert.Report`.
        origin: the original folder of an export.

    Raises:
        UserError: writing failed, and the unfinished folder was kept.
    """
    from megatron_vl.weights.manifest import UNFINISHED

    try:
        report = work()
    except OSError as error:
        if isinstance(error, FileExistsError) or not (options.out / UNFINISHED).is_file():
            raise
        raise UserError(
            f"{error}\n{options.out} keeps what was written; run the same command again to continue"
        ) from error

    if options.json:
        result = dataclasses.asdict(report) | {
            "out": str(report.out),
            "layout": report.layout and report.layout.as_dict(),
            "cast": [[*types, n] for types, n in report.cast.items()],
        }
        print(json.dumps(result))
    else:
        _show(report, origin)

    return 0


def _show(report: Any, origin: Path | None) -> None:
    """Prints sizes, speed, layout and notes of a conversion."""
    size = report.bytes / 1e9
    rate = report.bytes / max(report.seconds, 1e-9) / 1e9
    print(
        f"{report.out}: {report.tensors} tensors in {counted(report.files, 'file')}, "
        f"{size:.2f} GB, {report.seconds:.1f} s, {rate:.2f} GB/s"
    )
    if report.kept_tensors:
        kept = f"{report.kept_files} of {report.files} files were kept from before the interruption"
        print(f"continued: {kept}")

    if report.layout:
        layers = ",".join(map(str, report.layout.layers))
        experts = (
            f", ep {report.layout.ep}, etp {report.layout.etp}"
            if max(report.layout.ep, report.layout.etp) > 1
            else ""
        )
        print(
            f"layout: tp {report.layout.tp}, pp {report.layout.pp}, vpp {report.layout.vpp}, "
            f"layers {layers}{experts}"
        )

    _show_notes(report, origin)


def _show_notes(report: Any, origin: Path | None) -> None:
    if report.carried:
        kept = (
            "copied from the original folder as they are: they were not trained"
            if origin
            else "not converted: they are not trained, and an export copies them from the original folder"
        )
        print(f"note: {report.carried} tensors of multi-token prediction (mtp.*) were {kept}")

    for note in report.notes:
        print(f"note: {note}")
    for (old, new), count in report.cast.items():
        print(f"note: {count} tensors were cast from {old} to the origin's {new}")
    for name in report.skipped:
        print(
            f"note: {name} was not copied: weights that are not part of "
            f"{origin.name if origin else ''}'s safetensors index"
        )


def verify(options: VerifyOptions) -> int:
    """Compares two checkpoints, or weights with their hashes. Returns 1 if something differs."""
    from converters.verify import check_hashes, compare

    if options.b:
        result = compare(options.a, options.b, workers=options.workers)
    else:
        result = check_hashes(options.a, workers=options.workers)

    if options.json:
        print(json.dumps(dataclasses.asdict(result)))
    elif not result.differences:
        print(f"identical: {result.tensors} tensors" + ("" if options.b else ", equal to the manifest"))
    else:
        print(f"different: {len(result.differences)} of {result.tensors} tensors")
        for difference in result.differences[: options.show]:
            print(f"  {difference.name}: {difference.how}")
        if len(result.differences) > options.show:
            print(f"  ... and {len(result.differences) - options.show} more")
        if len(result.differences) == result.tensors and all(
            found.how.startswith("missing") for found in result.differences
        ):
            print("note: the two have no name in common; they are different models")

    if result.renamed and not options.json:
        print(
            f"note: {result.renamed} names differ only in naming style, which transformers reads alike: "
            f"{result.example}"
        )

    return 1 if result.differences else 0
