"""``megatron-vl parity``: loss, logits, activations and gradients of parallel layouts against ``transformers``."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from toolkit.commands.arguments import chosen_platform, positive
from toolkit.layouts import GRAMMAR, parse_layouts

MEMORY = """
Memory. transformers runs first, alone, on one device: 8 bytes a parameter for weights and gradients in float32 (bfloat16 needs
that too: it is judged by how far it takes transformers from float32), and activations without recomputation. Then each rank of
a layout holds 8 bytes (float32) or 6 bytes (bfloat16) of each of its own parameters; --steps adds AdamW's state, 8 or 12 bytes.
A 7B model: 66 GiB for transformers, then 46 GiB / (tp x pp) in bfloat16. Gradients and activations go over files in the
temporary folder (TMPDIR): 12 bytes a parameter at most. Where transformers does not fit, --reference-device cpu.
"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    text = "compare loss, logits, layers and gradients of any layout with transformers, on real pictures"
    parser = subparsers.add_parser(
        "parity",
        help=text,
        description=f"{text[0].upper() + text[1:]}. Names the first layer that departs. Exit code 1 when a layout departs.",
        epilog=MEMORY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--hf", type=Path, metavar="DIR", help="Hugging Face checkpoint folder")
    model.add_argument(
        "--family", metavar="NAME", help="a small model of this family with random weights instead: qwen2_5_vl, ..."
    )
    parser.add_argument("--layouts", type=_layouts, required=True, metavar="LIST", help=f"layouts with commas between: {GRAMMAR}")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="compare these Megatron weights (any layout, or a run) with the folder of --hf; default: a fresh conversion of it",
    )
    parser.add_argument(
        "--image", type=Path, action="append", default=[], metavar="FILE", help="a picture of your own; may be repeated"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="float32: within rounding. bfloat16, for GPUs: not further from float32 than transformers in bfloat16, times 1.5. "
        "(On CPU Megatron-core rounds RoPE's factors to bfloat16, which transformers does not.) Default: float32",
    )
    parser.add_argument("--platform", choices=["auto", "cpu", "cuda"], default="auto", help="default: cuda where there is a GPU")
    parser.add_argument(
        "--reference-device", default="", metavar="DEVICE", help="where transformers runs (default: as --platform)"
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=0,
        metavar="N",
        help="compare N optimizer steps instead: losses, gradient norms, weights and Adam's moments at the end (float32)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=_run, inputs=("hf", "checkpoint", "image"))


def _layouts(text: str) -> Any:
    try:
        return parse_layouts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from toolkit.parity.command import Request, run_parity

    if args.steps and args.dtype != "float32":
        raise ValueError(f"--steps {args.steps}: the number of steps of a float32 comparison; leave --dtype at float32")
    if args.family and args.checkpoint:
        raise ValueError("--checkpoint needs --hf: weights of --family are made for this comparison alone")
    platform = chosen_platform(args.platform)
    if args.reference_device.partition(":")[0] not in ("", "cpu", "cuda"):
        raise ValueError(f"--reference-device {args.reference_device!r} is unknown; valid: cpu, cuda, cuda:1")
    if args.reference_device.startswith("cuda"):
        chosen_platform("cuda", "--reference-device")
    request = Request(
        layouts=args.layouts,
        hf=args.hf,
        family=args.family or "",
        checkpoint=args.checkpoint,
        images=args.image,
        dtype=args.dtype,
        platform=platform,
        steps=args.steps,
        reference_device=args.reference_device,
    )
    console = Console(highlight=False, stderr=args.json)
    console = Console(highlight=False, stderr=args.json, width=max(130, console.width))
    report = run_parity(request, lambda line: console.print(f"[dim]{line}[/]"))
    if args.json:
        print(json.dumps(report, indent=2, default=str))
    else:
        show(report, console)
    return 0 if report["ok"] else 1


def show(report: dict[str, Any], console: Any) -> None:
    """The table, and a line for each layout that departs."""
    from rich.table import Table

    from toolkit.parity.command import by_component, first_departure
    from toolkit.parity.places import COMPONENTS

    differ, pixels = report["inputs"]["tokens_differ"], report["inputs"]["pixel_error"]
    if differ or pixels > 1e-5:
        what = f"tokens of conversations {differ} differ" if differ else f"pixels differ by up to {pixels:.1e}"
        console.print(f"[bold red]inputs:[/] {what} from those of the checkpoint's own processor")
    training = any("state" in result for result in report["layouts"].values())
    kinds = ("weights", "exp_avg", "exp_avg_sq") if training else (*COMPONENTS, "logits")
    what = "relative error after a training" if training else "relative L2 error of what it gives, and below of its gradients"
    table = Table(title=f"{report['hf']}, {report['dtype']}: {what}")
    for heading in ("layout", "loss", "transformers", *kinds, ""):
        table.add_column(heading, overflow="fold")
    for name, result in report["layouts"].items():
        steps = result.get("steps") or [{}]
        last, mark = steps[-1], "[green]ok[/]" if result["ok"] else "[bold red]FAILED[/]"
        cells = [f"{last['loss']:.6f}", f"{last['reference']:.6f}"] if "loss" in last else ["", ""]
        if training:
            state = result.get("state", {})
            cells += [f"{state[kind][1]:.0e}" if kind in state else "" for kind in kinds]
        else:
            gives, gradients = by_component(last.get("activations", {})), by_component(last.get("gradients", {}))
            cells += [f"{_error(gives.get(kind))}\n{_error(gradients.get(kind))}" for kind in COMPONENTS]
            cells += [_error(last.get("activations", {}).get("logits"))]
        table.add_row(name, *cells, mark)
    console.print(table)
    for name, result in report["layouts"].items():
        if "error" in result:
            console.print(f"[bold red]{name}:[/] {result['error']}", markup=True)
        elif place := first_departure(result):
            console.print(f"[bold red]{name}: the first layer that departs is {place}[/]")
            for tensor in result.get("tensors", []):
                console.print(f"  {tensor} is not what conversion of the Hugging Face folder gives", soft_wrap=True)
        elif not result["ok"]:
            console.print(f"[bold red]{name}: {json.dumps(result.get('state', {}), default=str)[:300]}[/]")


def _error(value: float | None) -> str:
    return "-" if value is None else "inf" if math.isinf(value) else f"{value:.0e}"
