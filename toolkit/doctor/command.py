"""``megatron-vl doctor``: finds what is wrong with this machine or run and says how to fix it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .options import DoctorOptions

if TYPE_CHECKING:
    from .run_checks import RunReport


def doctor(options: DoctorOptions) -> int:
    """Runs the requested checks. Returns exit code 1 if something is broken."""
    from megatron_vl.planning.gpus import query_gpus

    from .machine_checks import check_machine
    from .run_checks import RunReport, check_checkpoint, check_data, check_run

    findings = check_machine(Path.cwd(), options.nccl)
    if options.data:
        findings.append(check_data(options.data))
    if options.checkpoint:
        findings.append(check_checkpoint(options.checkpoint))
    report = RunReport()
    if options.config:
        report = check_run(
            ["--config", str(options.config), *options.fields], options.world_size, query_gpus()
        )
        findings += report.findings

    is_broken = any(finding.state == "broken" for finding in findings)
    if options.json:
        json_fields = {
            "broken": is_broken,
            "findings": list(map(dataclasses.asdict, findings)),
            "memory_gib": [stage.as_json() for stage in report.memory_by_stage],
        }
        print(json.dumps(json_fields, indent=2))
    else:
        print_findings(findings, report)

    return 1 if is_broken else 0


def print_findings(findings: list, report: RunReport) -> None:
    """Prints a line for each finding and the memory of each stage."""
    from rich.console import Console
    from rich.markup import escape

    from toolkit.memory_table import memory_table, wide_console

    console = Console(soft_wrap=True, highlight=False, file=sys.stdout)
    state_marks = {"ok": "[green]ok    [/]", "note": "[yellow]note  [/]", "broken": "[bold red]BROKEN[/]"}
    for finding in findings:
        console.print(f"{state_marks[finding.state]} {escape(finding.name)}: {escape(finding.found)}")
        if finding.advice:
            console.print(f"         -> {escape(finding.advice)}")

    if report.memory_by_stage:
        table_title = "Memory per GPU of each pipeline stage in GiB (estimate; row full of pictures)"
        stage_table = memory_table([stage.as_json() for stage in report.memory_by_stage], table_title)
        wide_console().print(stage_table)

    num_broken = sum(finding.state == "broken" for finding in findings)
    console.print(f"{num_broken} broken" if num_broken else "nothing is broken")
