"""``megatron-vl doctor``: what is wrong here, and what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from toolkit.commands.arguments import positive


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, a data set, a checkpoint, or a run before it is started",
        description="Checks Python packages, GPUs, NCCL, shared memory, open files and disk. With --config also everything about "
        "a run that can be known before a GPU is touched: fields, layout, memory of each stage, model, data, weights, disk. "
        "Exit code 1 when something is broken.",
    )
    parser.add_argument("--config", type=Path, metavar="RUN.yaml", help="check this run before it is started")
    parser.add_argument("--world-size", type=positive, metavar="N", help="GPUs of the whole run (default: those of this machine)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="read a data set and compare it with its hashes")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="read weights or a run's checkpoint and compare its hashes"
    )
    parser.add_argument("--nccl", action="store_true", help="reduce a tensor over all GPUs (gloo, two processes without one)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "overrides", nargs="*", metavar="-- --section.field value", help="fields of the run that override those of --config"
    )
    parser.set_defaults(run=_run, inputs=("config", "data", "checkpoint"))


def _run(args: argparse.Namespace) -> int:
    from toolkit.doctor.machine import check_machine, list_gpus
    from toolkit.doctor.run import RunReport, check_checkpoint, check_data, check_run

    if args.overrides and not args.config:
        raise ValueError(f"{args.overrides[0]}: fields of a run go with --config RUN.yaml")
    findings = check_machine(Path.cwd(), args.nccl)
    if args.data:
        findings.append(check_data(args.data))
    if args.checkpoint:
        findings.append(check_checkpoint(args.checkpoint))
    report = RunReport()
    if args.config:
        report = check_run(["--config", str(args.config), *args.overrides], args.world_size, list_gpus())
        findings += report.findings
    failed = any(finding.state == "broken" for finding in findings)
    if args.json:
        shown = {"broken": failed, "findings": [dataclasses.asdict(finding) for finding in findings]}
        print(json.dumps(shown | {"memory_gib": [stage.as_json() for stage in report.memory]}, indent=2))
    else:
        _show(findings, report)
    return 1 if failed else 0


def _show(findings: list, report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from toolkit.doctor.run import memory_table

    console = Console(soft_wrap=True, highlight=False, file=sys.stdout)
    marks = {"ok": "[green]ok    [/]", "note": "[yellow]note  [/]", "broken": "[bold red]BROKEN[/]"}
    for finding in findings:
        console.print(f"{marks[finding.state]} {escape(finding.name)}: {escape(finding.found)}")
        if finding.advice:
            console.print(f"         -> {escape(finding.advice)}")
    if report.memory:
        head, *lines = memory_table(report.memory)
        table = Table(*head, title="Memory of a GPU of each pipeline stage, GiB, estimated; a row full of pictures")
        for line in lines:
            table.add_row(*line)
        # In 80 columns rich would cut the headings to "wei…"; a terminal wraps long lines by itself.
        Console(width=max(console.width, 120), highlight=False, file=sys.stdout).print(table)
    count = sum(finding.state == "broken" for finding in findings)
    console.print(f"{count} broken" if count else "nothing is broken")
