"""``megatron-vl evaluate``: compares a converted checkpoint with its original and scores a trained one."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vl.system.errors import UsageError

from .options import EvaluateOptions

if TYPE_CHECKING:
    from .evaluation import Evaluation


def evaluate(options: EvaluateOptions) -> int:
    try:
        dataset_name, lmu_data = find_dataset(options.data)
        from .evaluation import run_evaluation

        result = run_evaluation(options, dataset_name, lmu_data)
    # A folder without a checkpoint is a wrong argument too.
    except (UsageError, ValueError, FileNotFoundError) as error:
        print(f"megatron-vl evaluate: {error}", file=sys.stderr)
        return 2
    report = json.dumps({"passed": not result.problems, **dataclasses.asdict(result)}, indent=2)
    (options.out / "report.json").write_text(report + "\n")
    print_table(result, options.out / "report.json")
    return 1 if result.problems else 0


def find_dataset(data_argument: str) -> tuple[str, Path]:
    """Derives the name of a data set and the folder of its files from ``--data``.

    This imports nothing that takes long, so a mistake is reported at once.

    Raises:
        UsageError: there is no such table or folder.
    """
    path = Path(data_argument)
    if path.suffix == ".tsv" and path.is_file():
        return path.stem, path.parent.resolve()
    if "/" in data_argument or not data_argument.strip(".") or path.suffix == ".tsv":
        raise UsageError(
            f"--data {data_argument} is not a file; give the path of a table, NAME.tsv, or a data set's name"
        )
    lmu_data_dir = Path(os.environ.get("LMUData") or Path.home() / "LMUData")
    if not lmu_data_dir.is_dir():
        raise UsageError(f"$LMUData {lmu_data_dir} is not a folder; tables are read from there")
    return data_argument, lmu_data_dir.resolve()


def print_table(result: Evaluation, report_path: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, width=max(100, Console().width))
    table = Table(
        "",
        *result.checkpoints,
        title=escape(f"{result.data}, {result.questions} questions"),
        title_justify="left",
    )
    checkpoints = list(result.checkpoints.values())
    for name in ("tensors", "answers"):
        table.add_row(name, *(facts[name] for facts in checkpoints))
    for name in dict.fromkeys(name for facts in checkpoints for name in facts["metrics"]):
        values = [facts["metrics"].get(name) for facts in checkpoints]
        texts = ["missing" if v is None else f"{v:.4f}".rstrip("0").rstrip(".") for v in values]
        table.add_row(escape(name), *texts)
    if any(facts["unanswered"] for facts in checkpoints):
        table.add_row("cut off while thinking", *(str(facts["unanswered"]) for facts in checkpoints))
    console.print(table)
    for problem in result.problems[:10]:
        console.print(problem, soft_wrap=True, markup=False)
    failures = f"FAILED: {len(result.problems)} problems" if result.problems else ""
    outcome = failures or "the converted checkpoint equals the original"
    console.print(f"{outcome}; {report_path}", soft_wrap=True, markup=False)
