"""``megatron-vl convert | split | merge | export | verify``: converts weights between all layouts."""

from converters.add_tokens import add_tokens
from converters.compare import compare_weights, verify_checkpoint_hashes
from converters.convert import WeightsReport, convert_weights, export_adapter, export_weights, reshard_weights
from megatron_vl.system.plurals import pluralize
from megatron_vl.weights.run_folder import find_latest_checkpoint

from .export_step import media_note
from .options import ONE_RANK, ConvertOptions, ExportOptions, MergeOptions, SplitOptions, VerifyOptions

SHOWN_DIFFERENCES = 10


def convert(options: ConvertOptions) -> int:
    if options.add_tokens is not None:
        return _print_report(add_tokens(options.hf, options.add_tokens, options.out, force=options.force))
    return _print_report(
        convert_weights(options.hf, options.out, options.layout_arguments, force=options.force)
    )


def split(options: SplitOptions) -> int:
    return _print_report(
        reshard_weights(
            options.checkpoint, options.out, options.layout_arguments or ONE_RANK, force=options.force
        )
    )


def merge(options: MergeOptions) -> int:
    return _print_report(reshard_weights(options.checkpoint, options.out, None, force=options.force))


def export(options: ExportOptions) -> int:
    latest = find_latest_checkpoint(options.checkpoint)
    arguments = (latest.path if latest else options.checkpoint, options.hf, options.out)
    if options.adapter:
        report = export_adapter(*arguments, force=options.force)
    else:
        report = export_weights(
            *arguments, force=options.force, merges_adapter=options.merge, as_fp8=options.fp8
        )
    if latest:
        report.notes.insert(0, f"exported step {latest.step}, the latest of {options.checkpoint}")
    report.notes += filter(None, [media_note(options.out, options.hf)])
    return _print_report(report, "" if options.adapter else options.hf.name)


def _print_report(report: WeightsReport, original: str = "") -> int:
    print(
        f"{report.out}: {report.tensors} tensors in {pluralize(report.files, 'file')}, "
        f"{report.bytes / 1e9:.2f} GB, {report.seconds:.1f} s, "
        f"{report.bytes / max(report.seconds, 1e-9) / 1e9:.2f} GB/s"
    )
    if layout := report.layout:
        layers = ",".join(map(str, layout.layers_per_chunk))
        experts = f", ep {layout.ep}, etp {layout.etp}" if max(layout.ep, layout.etp) > 1 else ""
        print(f"layout: tp {layout.tp}, pp {layout.pp}, vpp {layout.vpp}, layers {layers}{experts}")

    if report.carried:
        treatment = (
            "copied from the original folder as they are: they were not trained"
            if original
            else "not converted: they are not trained, and an export copies them from the original folder"
        )
        print(f"note: {report.carried} tensors of multi-token prediction (mtp.*) were {treatment}")
    for note in report.notes:
        print(f"note: {note}")
    for (old, new), count in report.cast.items():
        print(f"note: {count} tensors were cast from {old} to the origin's {new}")
    for name in report.skipped:
        print(f"note: {name} was not copied: weights that are not part of {original}'s safetensors index")
    return 0


def verify(options: VerifyOptions) -> int:
    result = compare_weights(options.a, options.b) if options.b else verify_checkpoint_hashes(options.a)
    differences = result.differences
    if not differences:
        print(f"identical: {result.tensors} tensors" + ("" if options.b else ", equal to the manifest"))
    else:
        print(f"different: {len(differences)} of {result.tensors} tensors")
        for difference in differences[:SHOWN_DIFFERENCES]:
            print(f"  {difference.name}: {difference.how}")
        if len(differences) > SHOWN_DIFFERENCES:
            print(f"  ... and {len(differences) - SHOWN_DIFFERENCES} more")
        if len(differences) == result.tensors and all(each.how.startswith("missing") for each in differences):
            print("note: the two have no name in common; they are different models")
    if result.renamed:
        print(
            f"note: {result.renamed} names differ only in naming style, which transformers reads alike: "
            f"{result.example}"
        )
    return 1 if differences else 0
