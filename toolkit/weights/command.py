"""``megatron-vl convert | split | merge | export | verify``: converts weights between all layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_vl.system.errors import UsageError
from megatron_vl.system.plurals import pluralize

from .options import (
    ONE_RANK,
    ConvertOptions,
    ExportOptions,
    MergeOptions,
    SplitOptions,
    VerifyOptions,
    WeightOutputOptions,
)

SHOWN_DIFFERENCES = 10
"""Number of differing tensors that `verify` names."""


def convert(options: ConvertOptions) -> int:
    """Converts Hugging Face weights, or an adapter for them, to Megatron weights."""
    from converters.convert import convert_adapter, convert_weights

    arguments = (options.hf, options.out, options.layout_arguments)
    if options.adapter is not None:
        return _run_conversion(options, convert_adapter, options.adapter, *arguments)
    return _run_conversion(options, convert_weights, *arguments)


def split(options: SplitOptions) -> int:
    """Writes Megatron weights in another layout; without a layout, as a single file."""
    from converters.convert import reshard_weights

    layout = options.layout_arguments or ONE_RANK
    arguments = (options.checkpoint, options.out, layout)
    return _run_conversion(options, reshard_weights, *arguments)


def merge(options: MergeOptions) -> int:
    """Merges Megatron weights into unsplit ones."""
    from converters.convert import reshard_weights

    arguments = (options.checkpoint, options.out, None)
    return _run_conversion(options, reshard_weights, *arguments)


def export(options: ExportOptions) -> int:
    """Exports Megatron weights to a Hugging Face folder, or the adapters of a run to a PEFT folder."""
    from converters.convert import export_adapter, export_weights

    if options.adapter and options.merge:
        raise UsageError("--adapter writes the adapters alone, --merge a whole model; give one of the two")
    arguments = (options.checkpoint, options.hf, options.out)
    if options.adapter:
        return _run_conversion(options, export_adapter, *arguments)
    return _run_conversion(
        options,
        export_weights,
        *arguments,
        original_dir=options.hf,
        merges_adapter=options.merge,
    )


def _run_conversion(
    options: WeightOutputOptions,
    run_conversion: Callable[..., Any],
    *arguments: Any,
    original_dir: Path | None = None,
    **settings: Any,
) -> int:
    """Runs a conversion and prints a report of what was written.

    Args:
        run_conversion: converts with these arguments and settings, and returns a
            :class:`converters.convert.WeightsReport`.
        original_dir: the original folder of an export.
    """
    conversion_report = run_conversion(*arguments, force=options.force, **settings)

    if isinstance(options, ExportOptions):
        from .export_step import media_note

        conversion_report.notes += filter(None, [media_note(options.out, options.hf)])
    _print_report(conversion_report, original_dir)
    return 0


def _print_report(conversion_report: Any, original_dir: Path | None) -> None:
    """Prints sizes, speed, layout and notes of a conversion."""
    size_gb = conversion_report.bytes / 1e9
    gb_per_second = conversion_report.bytes / max(conversion_report.seconds, 1e-9) / 1e9
    print(
        f"{conversion_report.out}: {conversion_report.tensors} tensors "
        f"in {pluralize(conversion_report.files, 'file')}, {size_gb:.2f} GB, "
        f"{conversion_report.seconds:.1f} s, {gb_per_second:.2f} GB/s"
    )
    if conversion_report.layout:
        layers_text = ",".join(map(str, conversion_report.layout.layers_per_chunk))
        experts_note = (
            f", ep {conversion_report.layout.ep}, etp {conversion_report.layout.etp}"
            if max(conversion_report.layout.ep, conversion_report.layout.etp) > 1
            else ""
        )
        print(
            f"layout: tp {conversion_report.layout.tp}, pp {conversion_report.layout.pp}, "
            f"vpp {conversion_report.layout.vpp}, layers {layers_text}{experts_note}"
        )

    _print_notes(conversion_report, original_dir)


def _print_notes(conversion_report: Any, original_dir: Path | None) -> None:
    if conversion_report.carried:
        treatment_note = (
            "copied from the original folder as they are: they were not trained"
            if original_dir
            else "not converted: they are not trained, and an export copies them from the original folder"
        )
        print(
            f"note: {conversion_report.carried} tensors of "
            f"multi-token prediction (mtp.*) were {treatment_note}"
        )

    for report_note in conversion_report.notes:
        print(f"note: {report_note}")
    for (old_dtype, new_dtype), tensor_count in conversion_report.cast.items():
        print(f"note: {tensor_count} tensors were cast from {old_dtype} to the origin's {new_dtype}")
    for file_name in conversion_report.skipped:
        print(
            f"note: {file_name} was not copied: weights that are not part of "
            f"{original_dir.name if original_dir else ''}'s safetensors index"
        )


def verify(options: VerifyOptions) -> int:
    """Compares two checkpoints, or weights with their hashes. Returns 1 if something differs."""
    from converters.compare import compare_weights, verify_checkpoint_hashes

    if options.b:
        comparison_result = compare_weights(options.a, options.b)
    else:
        comparison_result = verify_checkpoint_hashes(options.a)

    if not comparison_result.differences:
        print(
            f"identical: {comparison_result.tensors} tensors"
            + ("" if options.b else ", equal to the manifest")
        )
    else:
        print(f"different: {len(comparison_result.differences)} of {comparison_result.tensors} tensors")
        for difference in comparison_result.differences[:SHOWN_DIFFERENCES]:
            print(f"  {difference.name}: {difference.how}")
        if len(comparison_result.differences) > SHOWN_DIFFERENCES:
            print(f"  ... and {len(comparison_result.differences) - SHOWN_DIFFERENCES} more")
        if len(comparison_result.differences) == comparison_result.tensors and all(
            difference.how.startswith("missing") for difference in comparison_result.differences
        ):
            print("note: the two have no name in common; they are different models")

    if comparison_result.renamed:
        print(
            f"note: {comparison_result.renamed} names differ only in naming "
            f"style, which transformers reads alike: {comparison_result.example}"
        )

    return 1 if comparison_result.differences else 0
