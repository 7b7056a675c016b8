"""``megatron-vl parity``: compares loss, logits, activations and gradients with ``transformers``."""

from pathlib import Path
from typing import Any

from megatron_vl.system.signals import exit_on_signals
from toolkit.common.options import check_path

from .options import ParityOptions


def parity(options: ParityOptions) -> int:
    exit_on_signals()  # the temporary folders hold gradients of the whole model
    if not options.family:
        check_path(Path(options.hf), is_model=True)
    from rich.console import Console

    from .compare import run_parity

    console = Console(highlight=False, width=max(130, Console().width))
    parity_report = run_parity(options, lambda line: console.print(f"[dim]{line}[/]"))
    print_parity_report(parity_report, console)
    return 0 if parity_report["ok"] else 1


def print_parity_report(parity_report: dict[str, Any], console: Any) -> None:
    from rich.table import Table

    table = Table(title=f"{parity_report['hf']}, {parity_report['dtype']}: largest relative L2 errors")
    for heading in ("layout", "loss", "transformers", "errors", ""):
        table.add_column(heading, overflow="fold")
    for layout_text, result in parity_report["layouts"].items():
        row = ["", "", ""]
        if "error" not in result:
            [step] = result["steps"]
            output, gradient = (
                max(step["activations"], key=step["activations"].get),
                next(iter(step["worst"])),
            )
            row = [
                f"{step['loss']:.6f}",
                f"{step['reference']:.6f}",
                f"loss {step['loss_error']:.0e}, outputs {step['activations'][output]:.0e} ({output}),"
                f" gradients {step['gradient_error']:.0e} ({gradient})",
            ]
        table.add_row(layout_text, *row, "[green]ok[/]" if result["ok"] else "[bold red]FAILED[/]")
    console.print(table)
    for layout_text, result in parity_report["layouts"].items():
        if "error" in result:
            console.print(f"[bold red]{layout_text}:[/] {result['error']}")
        elif departure := result["steps"][0]["departs"]:
            console.print(f"[bold red]{layout_text}: {departure} departs first[/]")
