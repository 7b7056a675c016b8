"""``megatron-vl parity``: compares loss, logits, activations and gradients with ``transformers``."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from megatron_vl.errors import UserError
from toolkit.platform_choice import choose_platform

from .options import ParityOptions


def parity(options: ParityOptions) -> int:
    """Compares the layouts and prints the table. Returns exit code 1 if a layout departs."""
    from rich.console import Console

    from .compare import run_parity

    platform = choose_platform(options.platform)
    options = dataclasses.replace(options, platform=platform)
    if options.reference_device.partition(":")[0] not in ("", "cpu", "cuda"):
        raise UserError(
            f"--reference-device {options.reference_device!r} is unknown; valid: cpu, cuda, cuda:1"
        )
    if options.reference_device.startswith("cuda"):
        choose_platform("cuda", "--reference-device")

    console = Console(highlight=False, stderr=options.json, width=max(130, Console().width))
    parity_report = run_parity(options, lambda line: console.print(f"[dim]{line}[/]"))
    if options.json:
        print(json.dumps(parity_report, indent=2, default=str))
    else:
        print_parity_report(parity_report, console)

    return 0 if parity_report["ok"] else 1


def print_parity_report(parity_report: dict[str, Any], console: Any) -> None:
    """Prints the table, and a line for each layout that departs."""
    from .compare import first_departure

    differing_samples = parity_report["inputs"]["tokens_differ"]
    pixel_error = parity_report["inputs"]["pixel_error"]
    if differing_samples or pixel_error > 1e-5:
        input_problem = f"pixels differ by up to {pixel_error:.1e}"
        if differing_samples:
            input_problem = f"tokens of conversations {differing_samples} differ"
        console.print(f"[bold red]inputs:[/] {input_problem} from those of the checkpoint's own processor")

    if adapter_facts := parity_report.get("adapter"):
        file_text = "the same bits" if adapter_facts["same_file"] else "[bold red]other tensors[/]"
        console.print(
            f"adapter: merged weights differ from peft's by {adapter_facts['merge_error']:.1e} of the largest"
            f" weight; converted and exported again, its file has {file_text}"
        )
    console.print(_report_table(parity_report))
    for layout_text, layout_result in parity_report["layouts"].items():
        if "error" in layout_result:
            console.print(f"[bold red]{layout_text}:[/] {layout_result['error']}", markup=True)
        elif first_location := first_departure(layout_result):
            console.print(f"[bold red]{layout_text}: the first layer that departs is {first_location}[/]")
            for tensor_name in layout_result.get("tensors", []):
                console.print(
                    f"  {tensor_name} differs from a conversion of the Hugging Face folder", soft_wrap=True
                )
        elif not layout_result["ok"]:
            console.print(
                f"[bold red]{layout_text}: {json.dumps(layout_result.get('state', {}), default=str)[:300]}[/]"
            )


def _report_table(parity_report: dict[str, Any]) -> Any:
    """Makes a table with a line for each layout: losses, and errors by component or by kind of state."""
    from rich.table import Table

    from .locations import COMPONENTS

    is_training = any("state" in layout_result for layout_result in parity_report["layouts"].values())
    column_kinds = ("weights", "exp_avg", "exp_avg_sq") if is_training else (*COMPONENTS, "logits")
    table_subject = "relative L2 error of outputs (above) and gradients (below)"
    if is_training:
        table_subject = "relative error after a training"

    table = Table(title=f"{parity_report['hf']}, {parity_report['dtype']}: {table_subject}")
    for column_heading in ("layout", "loss", "transformers", *column_kinds, ""):
        table.add_column(column_heading, overflow="fold")

    for layout_text, layout_result in parity_report["layouts"].items():
        layout_steps = layout_result.get("steps")
        last_step = layout_steps[-1] if layout_steps else {}
        table_cells = ["", ""]
        if "loss" in last_step:
            table_cells = [f"{last_step['loss']:.6f}", f"{last_step['reference']:.6f}"]

        if is_training:
            state_errors = layout_result.get("state", {})
            for kind in column_kinds:
                table_cells.append(f"{state_errors[kind][1]:.0e}" if kind in state_errors else "")
        else:
            table_cells += _component_errors(last_step)

        verdict = "[green]ok[/]" if layout_result["ok"] else "[bold red]FAILED[/]"
        table.add_row(layout_text, *table_cells, verdict)

    return table


def _component_errors(step_result: dict[str, Any]) -> list[str]:
    """A cell for each component, with the errors of outputs and gradients, and one for the logits."""
    from .locations import COMPONENTS, location_component, worst_errors

    output_errors = worst_errors(step_result.get("activations", {}), location_component)
    gradient_errors = worst_errors(step_result.get("gradients", {}), location_component)

    component_cells = []
    for kind in COMPONENTS:
        output_text = _error_text(output_errors.get(kind))
        component_cells.append(f"{output_text}\n{_error_text(gradient_errors.get(kind))}")
    return [*component_cells, _error_text(step_result.get("activations", {}).get("logits"))]


def _error_text(relative_error: float | None) -> str:
    return "-" if relative_error is None else "inf" if math.isinf(relative_error) else f"{relative_error:.0e}"
