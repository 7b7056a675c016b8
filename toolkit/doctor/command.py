"""``megatron-vl doctor``: finds what is wrong with this machine and says how to fix it."""

import json
import sys
from dataclasses import asdict

from .options import DoctorOptions


def doctor(options: DoctorOptions) -> int:
    from .machine_checks import check_machine

    findings = check_machine(options.nccl)
    num_broken = sum(finding.state == "broken" for finding in findings)
    if options.json:
        print(json.dumps({"broken": num_broken > 0, "findings": [*map(asdict, findings)]}, indent=2))
        return min(1, num_broken)

    from rich.console import Console
    from rich.markup import escape

    console = Console(soft_wrap=True, highlight=False, file=sys.stdout)
    state_marks = {"ok": "[green]ok    [/]", "note": "[yellow]note  [/]", "broken": "[bold red]BROKEN[/]"}
    for finding in findings:
        console.print(f"{state_marks[finding.state]} {escape(finding.name)}: {escape(finding.found)}")
        if finding.advice:
            console.print(f"         -> {escape(finding.advice)}")
    console.print(f"{num_broken} broken" if num_broken else "nothing is broken")
    return min(1, num_broken)
