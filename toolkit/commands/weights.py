"""``megatron-vl convert | split | merge | export | verify``: weights between Hugging Face and Megatron, in any layout."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.cli import CommandError
from toolkit.commands.arguments import numbers

CHECKPOINT = "Megatron weights of any layout, or a training run's folder (its latest step), or one of its step folders"


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the five subcommands."""
    convert = _add(
        subparsers,
        "convert",
        "Hugging Face folder -> Megatron weights, unsplit, or split when --tp, --pp or --ep is given",
        _convert,
    )
    convert.add_argument("--hf", type=Path, required=True, metavar="HF_DIR", help="Hugging Face checkpoint folder (safetensors)")
    _layout_options(convert)

    split = _add(
        subparsers, "split", "Megatron weights of any layout -> one file for each tensor or expert x pipeline rank", _split
    )
    split.add_argument("--checkpoint", type=Path, required=True, help=CHECKPOINT)
    _layout_options(split)

    merge = _add(subparsers, "merge", "Megatron weights of any layout -> unsplit Megatron weights", _merge)
    merge.add_argument("--checkpoint", type=Path, required=True, metavar="SHARDS", help=CHECKPOINT)

    export = _add(subparsers, "export", "Megatron weights of any layout -> Hugging Face folder like the one of origin", _export)
    export.add_argument("--checkpoint", type=Path, required=True, help=CHECKPOINT)
    export.add_argument(
        "--hf",
        type=Path,
        required=True,
        metavar="HF_DIR_OF_ORIGIN",
        help="Hugging Face folder that the weights came from: gives tensor names, types and files; config, tokenizer, processor "
        "and chat template are copied from it",
    )
    for command in (convert, split, merge, export):
        command.add_argument(
            "--out",
            type=Path,
            required=True,
            help="folder to write; must not exist, or be empty, or hold what the same command left when it was interrupted: it "
            "goes on then",
        )
        command.add_argument(
            "--force", action="store_true", help="replace the checkpoint, or another unfinished conversion, that is in --out"
        )
        _common_options(command)

    verify = _add(
        subparsers, "verify", "compare the tensors of two checkpoints bit for bit; exit code 1 when they differ", _verify
    )
    verify.add_argument("a", type=Path, metavar="A", help="Hugging Face folder, or Megatron weights of any layout")
    verify.add_argument(
        "b",
        type=Path,
        nargs="?",
        metavar="B",
        help="a folder of the same kind to compare with, of Hugging Face under either of its naming styles (model.layers, "
        "model.language_model.layers); left out: check Megatron weights A against their hashes",
    )
    verify.add_argument("--show", type=int, default=10, metavar="N", help="differing tensors to name (default 10)")
    _common_options(verify)


def _add(subparsers: argparse._SubParsersAction, name: str, text: str, run) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    inputs = {
        "convert": ("hf",),
        "split": ("checkpoint",),
        "merge": ("checkpoint",),
        "export": ("checkpoint", "hf"),
        "verify": ("a", "b"),
    }
    parser.set_defaults(run=run, inputs=inputs[name])
    return parser


def _layout_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tp", type=int, metavar="T", help="tensor parallel size in ranks (default 1)")
    parser.add_argument("--pp", type=int, metavar="P", help="pipeline parallel size in stages (default 1)")
    parser.add_argument("--vpp", type=int, metavar="V", help="virtual chunks of each pipeline stage (default 1)")
    parser.add_argument(
        "--layers",
        type=numbers,
        metavar="6,8,8,6",
        help="decoder layers of each of the pp x vpp chunks, in model order (default: even)",
    )
    parser.add_argument("--ep", type=int, metavar="E", help="expert parallel size in ranks, for models with experts (default 1)")
    parser.add_argument(
        "--etp", type=int, metavar="R", help="expert tensor parallel size in ranks: each expert's matrices are cut (default 1)"
    )


def _common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="threads that read and write (default: one a core, at most 8)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _layout(args: argparse.Namespace) -> dict:
    sizes = {name: getattr(args, name) for name in ("tp", "pp", "vpp", "ep", "etp")}
    return {name: 1 if size is None else size for name, size in sizes.items()} | {"layers": args.layers}


def _convert(args: argparse.Namespace) -> int:
    from converters.convert import convert

    split = any(value is not None for value in (args.tp, args.pp, args.vpp, args.layers, args.ep, args.etp))
    return _finish(
        args, lambda: convert(args.hf, args.out, _layout(args) if split else None, workers=args.workers, force=args.force)
    )


def _split(args: argparse.Namespace) -> int:
    from converters.convert import reshard

    return _finish(args, lambda: reshard(args.checkpoint, args.out, _layout(args), workers=args.workers, force=args.force))


def _merge(args: argparse.Namespace) -> int:
    from converters.convert import reshard

    return _finish(args, lambda: reshard(args.checkpoint, args.out, None, workers=args.workers, force=args.force))


def _export(args: argparse.Namespace) -> int:
    from converters.convert import export

    return _finish(args, lambda: export(args.checkpoint, args.hf, args.out, workers=args.workers, force=args.force))


@contextmanager
def _disk_errors_told() -> Iterator[None]:
    """A full disk or a missing permission is a message too; what the command line tells by itself passes through."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, NotADirectoryError):
        raise
    except OSError as error:
        raise CommandError(str(error)) from error


def _finish(args: argparse.Namespace, work) -> int:
    """Runs a conversion and prints what was written."""
    from megatron_vl.weights import UNFINISHED

    with _disk_errors_told():
        try:
            report = work()
        except OSError as error:
            if isinstance(error, FileExistsError) or not (args.out / UNFINISHED).is_file():
                raise
            raise CommandError(f"{error}\n{args.out} keeps what was written: the same command goes on from there") from error
    if args.json:
        result = dataclasses.asdict(report) | {"out": str(report.out), "cast": [[*types, n] for types, n in report.cast.items()]}
        print(json.dumps(result))
        return 0
    size, rate = report.bytes / 1e9, report.bytes / max(report.seconds, 1e-9) / 1e9
    print(
        f"{report.out}: {report.tensors} tensors in {report.files} files, {size:.2f} GB, {report.seconds:.1f} s, {rate:.2f} GB/s"
    )
    if report.kept_tensors:
        print(f"went on: {report.kept_files} of {report.files} files kept from before the interruption")
    if report.layout:
        layers = ",".join(map(str, report.layout.layers))
        experts = f", ep {report.layout.ep}, etp {report.layout.etp}" if max(report.layout.ep, report.layout.etp) > 1 else ""
        print(f"layout: tp {report.layout.tp}, pp {report.layout.pp}, vpp {report.layout.vpp}, layers {layers}{experts}")
    for (old, new), count in report.cast.items():
        print(f"note: {count} tensors were cast from {old} to the origin's {new}")
    for name in report.skipped:
        print(f"note: {name} was not copied: weights that are not part of {Path(args.hf).name}'s safetensors index")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from converters.verify import check_hashes, compare

    with _disk_errors_told():
        result = compare(args.a, args.b, workers=args.workers) if args.b else check_hashes(args.a, workers=args.workers)
    if args.json:
        print(json.dumps(dataclasses.asdict(result)))
    elif not result.differences:
        print(f"identical: {result.tensors} tensors" + ("" if args.b else ", as in the manifest"))
    else:
        print(f"different: {len(result.differences)} of {result.tensors} tensors")
        for difference in result.differences[: args.show]:
            print(f"  {difference.name}: {difference.how}")
        if len(result.differences) > args.show:
            print(f"  ... and {len(result.differences) - args.show} more")
        if len(result.differences) == result.tensors and all(found.how.startswith("missing") for found in result.differences):
            print("note: not one name in common; these are different models")
    if result.renamed and not args.json:
        print(f"note: {result.renamed} names differ by naming style only, which transformers reads alike: {result.example}")
    return 1 if result.differences else 0
