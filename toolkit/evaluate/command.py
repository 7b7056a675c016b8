"""``megatron-vl evaluate``: compares a converted checkpoint with its original and scores a trained one."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

from megatron_vl.errors import UsageError

from .options import EvaluateOptions


def evaluate(options: EvaluateOptions) -> int:
    """Runs the gates and writes the report. Returns the exit code."""
    try:
        options.data, options.lmu_data = find_dataset(options.data, options.lmu_data, not options.no_scores)
        from toolkit.evaluate.evaluation import run_evaluation

        result = run_evaluation(options, lambda line: print(line, file=sys.stderr, flush=True))
    # A folder without a checkpoint is a wrong argument too.
    except (UsageError, ValueError, FileNotFoundError) as error:
        print(f"megatron-vl evaluate: {error}", file=sys.stderr)
        return 2
    from toolkit.evaluate.report import print_report, write_html

    (options.out / "report.json").write_text(json.dumps(result.as_json(), indent=2) + "\n")
    write_html(result, options.out / "report.html")
    if options.json:
        print(json.dumps(result.as_json()))
    else:
        print_report(result, options.out)
    return 0 if result.passed else 1


def find_dataset(data_argument: str, lmu_data_dir: Path | None, with_scores: bool) -> tuple[str, Path]:
    """Derives the name of a data set and the folder of its files from ``--data`` and ``--lmu-data``.

    This imports nothing that takes long, so a mistake is reported at once.

    Raises:
        UsageError: there is no such table or folder, or the table lacks a column.
    """
    table_path = Path(data_argument)
    if table_path.suffix == ".tsv" and table_path.is_file() and table_path.stem.strip("."):
        if lmu_data_dir is not None:
            raise UsageError(
                f"--lmu-data {lmu_data_dir}: leave it out; --data "
                f"{data_argument} is a table whose own folder is used"
            )
        _check_columns(table_path, with_scores)
        return table_path.stem, table_path.parent.resolve()
    if "/" in data_argument or not data_argument.strip(".") or table_path.suffix == ".tsv":
        raise UsageError(
            f"--data {data_argument} is not a file; give the "
            "path of a table, NAME.tsv, or the name of a data set"
        )

    lmu_data_dir = lmu_data_dir or Path(os.environ.get("LMUData") or Path.home() / "LMUData")
    if not lmu_data_dir.is_dir():
        raise UsageError(f"--lmu-data {lmu_data_dir} is not a folder; tables are read from there")
    return data_argument, lmu_data_dir


def _check_columns(table_path: Path, with_scores: bool) -> None:
    with table_path.open(encoding="utf-8-sig", errors="replace", newline="") as table_file:
        try:
            column_names = next(csv.reader(table_file, delimiter="\t"), [])
        except csv.Error as error:
            raise UsageError(f"{table_path} is not a table: {error}") from error

    needed_columns = ["index", "question"]
    if with_scores and {"A", "B"} <= set(column_names):  # multiple choice
        needed_columns.append("answer")
    if missing_columns := [column for column in needed_columns if column not in column_names]:
        raise UsageError(
            f"{table_path}: no column {', '.join(missing_columns)}; it has {', '.join(column_names)[:300]}"
        )
