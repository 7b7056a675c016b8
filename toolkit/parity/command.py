"""``megatron-vl parity``: compares loss, logits, activations and gradients with ``transformers``."""

from __future__ import annotations

import json
import math
from typing import Any

from megatron_vl.errors import UserError
from toolkit.device import chosen_platform
from toolkit.layouts import parse_layouts

from .options import ParityOptions


def parity(options: ParityOptions) -> int:
    """Compares the layouts and prints the table. Returns exit code 1 if a layout departs."""
    from rich.console import Console

    from .compare import ParityRequest, run_parity

    layouts = parse_layouts(options.layouts)
    platform = chosen_platform(options.platform)
    if options.reference_device.partition(":")[0] not in ("", "cpu", "cuda"):
        raise UserError(
            f"--reference-device {options.reference_device!r} is unknown; valid: cpu, cuda, cuda:1"
        )

    if options.reference_device.startswith("cuda"):
        chosen_platform("cuda", "--reference-device")

    request = ParityRequest(
        layouts=layouts,
        hf=options.hf,
        family=options.family or "",
        checkpoint=options.checkpoint,
        images=options.image,
        dtype=options.dtype,
        platform=platform,
        steps=options.steps,
        reference_device=options.reference_device,
    )

    console = Console(highlight=False, stderr=options.json, width=max(130, Console().width))
    report = run_parity(request, lambda line: console.print(f"[dim]{line}[/]"))
    if options.json:
        print(json.dumps(report, indent=2, default=str))
    else:
        show(report, console)

    return 0 if report["ok"] else 1


def show(report: dict[str, Any], console: Any) -> None:
    """Prints the table, and a line for each layout that departs."""
    from .compare import first_departure

    differ, pixels = report["inputs"]["tokens_differ"], report["inputs"]["pixel_error"]
    if differ or pixels > 1e-5:
        what = (
            f"tokens of conversations {differ} differ" if differ else f"pixels differ by up to {pixels:.1e}"
        )
        console.print(f"[bold red]inputs:[/] {what} from those of the checkpoint's own processor")

    console.print(_table(report))
    for name, result in report["layouts"].items():
        if "error" in result:
            console.print(f"[bold red]{name}:[/] {result['error']}", markup=True)
        elif location := first_departure(result):
            console.print(f"[bold red]{name}: the first layer that departs is {location}[/]")
            for tensor in result.get("tensors", []):
                console.print(
                    f"  {tensor} differs from a conversion of the Hugging Face folder", soft_wrap=True
                )
        elif not result["ok"]:
            console.print(f"[bold red]{name}: {json.dumps(result.get('state', {}), default=str)[:300]}[/]")


def _table(report: dict[str, Any]) -> Any:
    """Makes a table with a line for each layout: losses, and errors by component or by kind of state."""
    from rich.table import Table

    from .locations import COMPONENTS

    training = any("state" in result for result in report["layouts"].values())
    kinds = ("weights", "exp_avg", "exp_avg_sq") if training else (*COMPONENTS, "logits")
    what = (
        "relative error after a training"
        if training
        else "relative L2 error of outputs (above) and gradients (below)"
    )

    table = Table(title=f"{report['hf']}, {report['dtype']}: {what}")
    for heading in ("layout", "loss", "transformers", *kinds, ""):
        table.add_column(heading, overflow="fold")

    for name, result in report["layouts"].items():
        last = (result.get("steps") or [{}])[-1]
        cells = [f"{last['loss']:.6f}", f"{last['reference']:.6f}"] if "loss" in last else ["", ""]
        if training:
            state = result.get("state", {})
            cells += [f"{state[kind][1]:.0e}" if kind in state else "" for kind in kinds]
        else:
            cells += _component_errors(last)
        table.add_row(name, *cells, "[green]ok[/]" if result["ok"] else "[bold red]FAILED[/]")

    return table


def _component_errors(step: dict[str, Any]) -> list[str]:
    """A cell for each component, with the errors of outputs and gradients, and one for the logits."""
    from .compare import by_component
    from .locations import COMPONENTS

    outputs = by_component(step.get("activations", {}))
    gradients = by_component(step.get("gradients", {}))
    cells = [f"{_error(outputs.get(kind))}\n{_error(gradients.get(kind))}" for kind in COMPONENTS]
    return [*cells, _error(step.get("activations", {}).get("logits"))]


def _error(value: float | None) -> str:
    return "-" if value is None else "inf" if math.isinf(value) else f"{value:.0e}"
