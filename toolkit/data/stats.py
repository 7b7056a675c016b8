"""Shows what a data set holds as tables or JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from data_tools.statistics import (
    QUANTITIES,
    SourceSizes,
    Statistics,
    distribution,
    pass_in_words,
)

from .prepared import Prepared

NAMES = {"p5": "5 %", "p50": "median", "p95": "95 %", "p99": "99 %"}


def of_samples(found: Statistics) -> dict[str, dict[str, float]]:
    """Distributions of the usable samples, each counted as often as training draws it."""
    return {name: distribution(*found.of_samples(name)) for name in QUANTITIES}


def of_rows(found: Statistics) -> dict[str, dict[str, float]]:
    return {name: distribution(values) for name, values in found.of_rows().items()}


def of_source(one: SourceSizes) -> dict[str, Any]:
    """What a source holds; sums are those of its usable samples."""
    sums = {name: int(one.sizes[name][one.usable].sum()) for name in QUANTITIES}
    return {
        "name": one.source.name,
        "share": round(one.source.share, 6),
        "samples": len(one.source),
        "usable": int(one.usable.sum()),
        **sums,
        "turns": one.turns,
    }


def as_json(prepared: Prepared, found: Statistics) -> dict[str, Any]:
    """The output of ``--json``."""
    return {
        "data": str(prepared.path),
        "split": found.split,
        "seq_len": found.data.seq_len,
        "samples": found.samples,
        "usable": found.usable,
        "sources": [of_source(one) for one in found.sources],
        "per_sample": of_samples(found),
        "rows": len(found.rows),
        "per_row": of_rows(found),
        "pass": found.one_pass(prepared.config.global_batch_size),
        "left_out": dict(found.left_out()),
    }


def rows_basis(found: Statistics) -> str:
    """Says how the rows were made."""
    of = "all samples" if found.packed >= found.samples else f"{found.packed:,} samples"
    return (
        f"{len(found.rows):,} rows of {found.data.seq_len:,} tokens, made of {of} in random order as a loader"
        " makes them."
    )


def print_stats(prepared: Prepared, found: Statistics) -> None:
    console = Console(highlight=False, width=max(100, Console().width))

    def say(text: str) -> None:
        console.print(printable(text), markup=False, soft_wrap=True)

    say(f"{prepared.path}: {found.samples:,} samples of {found.split}, {found.usable:,} usable")
    for title, table in tables(found).items():
        shown = Table(title, *table[0][1], title_justify="left")
        for name, cells in table:
            shown.add_row(printable(name), *cells.values())
        console.print(shown)
    say(f"Rows: {rows_basis(found)}")
    say(pass_in_words(found.one_pass(prepared.config.global_batch_size)))
    for reason, count in found.left_out().most_common():
        say(f"left out: {count:,} ({percent(count / found.samples)}) {reason}")


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
