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
        options.data, options.lmu_data = find_data(options.data, options.lmu_data, not options.no_scores)
        from toolkit.evaluate.comparison import evaluate as compare

        result = compare(options, lambda line: print(line, file=sys.stderr, flush=True))
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


def find_data(data: str, folder: Path | None, scored: bool) -> tuple[str, Path]:
    """Derives the name of a data set and the folder of its files from ``--data`` and ``--lmu-data``, before
    anything heavy is imported.

    Raises:
        UsageError: there is no such table or folder, or the table lacks a column.
    """
    path = Path(data)
    if path.suffix == ".tsv" and path.is_file() and path.stem.strip("."):
        if folder is not None:
            raise UsageError(
                f"--lmu-data {folder}: leave it out; --data {data} is a table whose own folder is used"
            )
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            try:
                columns = next(csv.reader(file, delimiter="\t"), [])
            except csv.Error as error:
                raise UsageError(f"{path} is not a table: {error}") from error
        needed = ["index", "question", *(["answer"] if scored and {"A", "B"} <= set(columns) else [])]
        if missing := [column for column in needed if column not in columns]:
            raise UsageError(f"{path}: no column {', '.join(missing)}; it has {', '.join(columns)[:300]}")
        return path.stem, path.parent.resolve()
    if "/" in data or not data.strip(".") or path.suffix == ".tsv":
        raise UsageError(
            f"--data {data} is not a file; give the path of a table, NAME.tsv, or the name of a data set"
        )

    folder = folder or Path(os.environ.get("LMUData") or Path.home() / "LMUData")
    if not folder.is_dir():
        raise UsageError(f"--lmu-data {folder} is not a folder; tables are read from there")
    return data, folder
