"""``megatron-vl doctor``: finds what is wrong with this machine or run and says how to fix it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .options import DoctorOptions

if TYPE_CHECKING:
    from .before_start import RunReport


def doctor(options: DoctorOptions) -> int:
    """Runs the requested checks. Returns exit code 1 if something is broken."""
    from .before_start import RunReport, check_checkpoint, check_data, check_run
    from .machine import check_machine, list_gpus

    findings = check_machine(Path.cwd(), options.nccl)
    if options.data:
        findings.append(check_data(options.data))
    if options.checkpoint:
        findings.append(check_checkpoint(options.checkpoint))
    report = RunReport()
    if options.config:
        report = check_run(
            ["--config", str(options.config), *options.fields], options.world_size, list_gpus()
        )
        findings += report.findings

    failed = any(finding.state == "broken" for finding in findings)
    if options.json:
        shown = {"broken": failed, "findings": [dataclasses.asdict(finding) for finding in findings]}
        print(json.dumps(shown | {"memory_gib": [stage.as_json() for stage in report.memory]}, indent=2))
    else:
        show(findings, report)

    return 1 if failed else 0


def show(findings: list, report: RunReport) -> None:
    """Prints a line for each finding and the memory of each stage."""
    from rich.console import Console
    from rich.markup import escape

    from toolkit.memory_table import WIDTH, memory_table

    console = Console(soft_wrap=True, highlight=False, file=sys.stdout)
    marks = {"ok": "[green]ok    [/]", "note": "[yellow]note  [/]", "broken": "[bold red]BROKEN[/]"}
    for finding in findings:
        console.print(f"{marks[finding.state]} {escape(finding.name)}: {escape(finding.found)}")
        if finding.advice:
            console.print(f"         -> {escape(finding.advice)}")

    if report.memory:
        title = "Memory per GPU of each pipeline stage in GiB (estimate; row full of pictures)"
        table = memory_table([stage.as_json() for stage in report.memory], title)
        # A terminal wraps long lines itself.
        Console(width=max(console.width, WIDTH), highlight=False, file=sys.stdout).print(table)

    count = sum(finding.state == "broken" for finding in findings)
    console.print(f"{count} broken" if count else "nothing is broken")
