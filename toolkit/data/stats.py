"""Shows what a data set holds as tables or JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from data_tools.statistics import (
    MOST_PACKED,
    QUANTITIES,
    SourceSizes,
    Statistics,
    distribution,
    pass_in_words,
)
from megatron_vl.data.source.location import Location

from .prepared import Prepared

NAMES = {"p5": "5 %", "p50": "median", "p95": "95 %", "p99": "99 %"}
EXAMPLES = 3
"""Largest number of examples for each reason."""
QUARANTINE_READ = 64 << 20
"""Number of bytes of a quarantine.jsonl that are read."""
DETAIL = 400
"""Largest number of characters in a detail."""

type Reasons = dict[str, tuple[int, list[tuple[str, str]]]]
"""Why samples or records are missing: how many, and examples with their details."""


def of_samples(found: Statistics) -> dict[str, dict[str, float]]:
    """Distributions of the usable samples, each counted as often as training draws it."""
    return {name: distribution(*found.of_samples(name)) for name in QUANTITIES}


def of_rows(found: Statistics) -> dict[str, dict[str, float]]:
    return {name: distribution(values) for name, values in found.of_rows.items()}


def of_source(one: SourceSizes) -> dict[str, Any]:
    """What a source holds; sums are those of its usable samples."""
    sums = {name: int(one.sizes[name][one.usable].sum()) for name in QUANTITIES}
    return {
        "name": one.source.name,
        "share": round(one.source.share, 6),
        "samples": len(one.source),
        "usable": one.meter.used,
        **sums,
        "turns": one.turns,
    }


def as_json(prepared: Prepared, found: Statistics) -> dict[str, Any]:
    """The output of ``--json``."""
    return {
        "data": str(prepared.path),
        "split": prepared.split,
        "seq_len": found.data.seq_len,
        "samples": found.samples,
        "usable": found.usable,
        "sources": [of_source(one) for one in found.sources],
        "per_sample": of_samples(found),
        "per_row": of_rows(found),
        "pass": found.one_pass(prepared.config.global_batch_size),
        "left_out": dict(found.left_out()),
        "quarantined": {
            one.source.name: {
                reason: count for reason, (count, _) in quarantined(one.source.data.path).items()
            }
            for one in found.sources
        },
    }


def sentences(prepared: Prepared, found: Statistics) -> list[str]:
    """What tables cannot say: how rows are made, how long a pass is, and what is missing."""
    of = "all samples" if found.samples <= MOST_PACKED else f"{MOST_PACKED:,} samples"
    lines = [
        f"Rows of {found.data.seq_len:,} tokens are made of {of} in random order, as a loader makes them",
        pass_in_words(found.one_pass(prepared.config.global_batch_size)),
    ]
    lines += [
        f"left out: {count:,} ({percent(count / found.samples)}) {reason}"
        for reason, count in found.left_out().most_common()
    ]
    return lines + [
        f"quarantined by the conversion of {one.source.name}: {count:,} {reason}"
        for one in found.sources
        for reason, (count, _) in quarantined(one.source.data.path).items()
    ]


def print_stats(prepared: Prepared, found: Statistics) -> None:
    console = Console(highlight=False, width=max(100, Console().width))

    def say(text: str) -> None:
        console.print(printable(text), markup=False, soft_wrap=True)

    say(f"{prepared.path}: {found.samples:,} samples of {prepared.split}, {found.usable:,} usable")
    for title, table in tables(found).items():
        shown = Table(title, *table[0][1], title_justify="left")
        for name, cells in table:
            shown.add_row(printable(name), *cells.values())
        console.print(shown)
    for line in sentences(prepared, found):
        say(line)


def tables(found: Statistics) -> dict[str, list[tuple[str, dict[str, str]]]]:
    """By title, the lines of a table: a name, and cells by the head of their column."""
    return {
        "source": [_line(of_source(one)) for one in found.sources],
        "of a sample": [(name, _cells(name, each)) for name, each in of_samples(found).items()],
        "of a row": [(name, _cells(name, each)) for name, each in of_rows(found).items()],
    }


def _line(facts: dict[str, Any]) -> tuple[str, dict[str, str]]:
    cells = {
        key: "unknown" if value is None else number(value) for key, value in facts.items() if key != "name"
    }
    return facts["name"], cells | {"share": percent(facts["share"])}


def _cells(name: str, found: dict[str, float]) -> dict[str, str]:
    show = percent if name == "fill" else number
    return {NAMES.get(key, key): show(value) for key, value in found.items()}


def quarantined(folder: Location) -> Reasons:
    """Why the quarantine.jsonl of a data set or of a run lists what it lists, the most frequent first."""
    found: Reasons = {}
    try:
        with (folder / "quarantine.jsonl").open("rb") as file:
            lines = file.read(QUARANTINE_READ).splitlines()
    except OSError:
        return found

    for line in lines:
        try:
            entry = json.loads(line)
            reason, detail = str(entry["reason"]), str(entry["detail"])[:DETAIL]
        except (ValueError, KeyError, TypeError, RecursionError):  # incomplete or damaged
            continue
        # A record of an input file, or a sample of a shard.
        names = ("file", "record", "field") if "file" in entry else ("key", "shard", "source", "step")
        origin = ", ".join(f"{name} {entry[name]}" for name in names if entry.get(name) not in (None, ""))
        count, examples = found.get(reason, (0, []))
        found[reason] = (count + 1, [*examples, (origin[:DETAIL], detail)][:EXAMPLES])
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


# --- Numbers as text ----------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Formats a number with at most four significant digits below 1,000, and as a whole number above."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def percent(value: float) -> str:
    return f"{value:.2%}"


def printable(text: str) -> str:
    """Spells out characters that a terminal or a page would act on or hide.

    These are control characters, and marks that change the direction of writing.
    """
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
