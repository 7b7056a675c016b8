"""Shows the distributions of a data set as tables or JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from data_tools.estimates import Estimate, Stratum, mean, quantile
from data_tools.passes import pass_as_json, pass_in_words
from data_tools.survey import SAMPLE_QUANTITIES, Survey, SurveyRow, fill, values_of

QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}
NAMES = {"p50": "median", "p5": "5 %", "p95": "95 %", "p99": "99 %"}
INTERVALS = "intervals are for 95 %, with one bound (≤ or ≥) where too few were drawn for the other"


@dataclass(frozen=True)
class Distribution:
    """The distribution of one quantity over samples or rows."""

    mean: Estimate
    least: float
    most: float
    quantiles: dict[str, Estimate]

    def as_json(self) -> dict[str, Any]:
        quantiles = {name: estimate.as_json() for name, estimate in self.quantiles.items()}
        return {
            "mean": self.mean.as_json(),
            "smallest_seen": self.least,
            "largest_seen": self.most,
            **quantiles,
        }


def row_quantities(seq_len: int) -> dict[str, Callable[[SurveyRow], float]]:
    """The quantities that are computed for each row."""
    quantities: dict[str, Callable[[SurveyRow], float]] = {
        "fill": lambda row: fill(row, seq_len),
        "samples": lambda row: len(row.samples),
    }
    return quantities | {
        name: (lambda row, of=of: row.total(of)) for name, of in SAMPLE_QUANTITIES.items() if name != "turns"
    }


def distribution(strata: list[Stratum]) -> Distribution:
    values, _ = values_of(strata)
    return Distribution(
        mean(strata),
        float(values.min()),
        float(values.max()),
        {name: quantile(strata, at) for name, at in QUANTILES.items()},
    )


def of_samples(found: Survey) -> dict[str, Distribution]:
    return {name: distribution(found.of_samples(of)) for name, of in SAMPLE_QUANTITIES.items()}


def of_rows(found: Survey) -> dict[str, Distribution]:
    return {name: distribution(found.of_rows(of)) for name, of in row_quantities(found.seq_len).items()}


def as_json(found: Survey, global_batch_size: int) -> dict[str, Any]:
    """The output of ``--json``. Bounds are those of the 95 % interval; null: not known."""
    per_sample = {name: each.as_json() for name, each in of_samples(found).items()}
    per_row = {name: each.as_json() for name, each in of_rows(found).items()}

    return {
        "data": str(found.path),
        "split": found.split,
        "samples": found.population,
        "drawn": len(found.samples),
        "usable": len(found.usable),
        "exact": found.exact,
        "stopped_by_time": found.stopped,
        "seed": found.seed,
        "seconds": round(found.seconds, 3),
        "seq_len": found.seq_len,
        "sources": [
            {"name": source.name, "samples": len(source), "share": round(source.share, 6)}
            for source in found.sources
        ],
        "per_sample": per_sample,
        "rows": len(found.rows),
        "per_row": per_row,
        "pass": pass_as_json(found, global_batch_size),
        "skipped": {reason: each.as_json() for reason, each in found.skipped().items()},
    }


def basis(found: Survey) -> str:
    """A sentence that says from which samples the numbers were computed."""
    if found.exact:
        return f"All {found.population:,} samples of {found.split} were read: their numbers are exact."
    reason = f" (until the time was up; seed {found.seed})" if found.stopped else f" (seed {found.seed})"
    return (
        f"{len(found.samples):,} of {found.population:,} samples of {found.split} were drawn at"
        f" random{reason}; {INTERVALS}."
    )


def rows_basis(found: Survey) -> str:
    """A sentence that says how the rows were made."""
    return (
        f"{len(found.rows):,} rows of {found.seq_len:,} tokens were packed from them in random order, as"
        f" a loader does; {INTERVALS}.{_repeated(found)}"
    )


def _repeated(found: Survey) -> str:
    """Says that there are fewer samples than the rows hold."""
    held = sum(len(row.samples) for row in found.rows)
    there = len(found.usable)
    if held <= 1.5 * there:
        return ""
    within = ", also within a row" if any(len(row.samples) > there for row in found.rows) else ""
    return f" Each of the {there:,} samples is in them {held / there:,.0f} times{within}."


def print_stats(found: Survey, global_batch_size: int) -> None:
    console = Console(highlight=False, width=max(110, Console().width))
    console.print(f"{found.path}\n{basis(found)} {found.seconds:.1f} s", markup=False, soft_wrap=True)
    if len(found.sources) > 1:
        _print_sources(found, console)
    console.print(_table("of a sample", of_samples(found)))
    console.print(rows_basis(found), markup=False, soft_wrap=True)
    console.print(_table("of a row", of_rows(found)))
    console.print(pass_in_words(pass_as_json(found, global_batch_size)), markup=False, soft_wrap=True)
    for reason, share in found.skipped().items():
        console.print(f"the loader would leave out {shares(share)}: {reason}", markup=False)


def _print_sources(found: Survey, console: Console) -> None:
    table = Table("source", "samples", "share of training", "drawn", title_justify="left")
    for number, source in enumerate(found.sources):
        drawn = sum(sample.source == number for sample in found.samples)
        table.add_row(printable(source.name), f"{len(source):,}", f"{source.share:.2%}", f"{drawn:,}")
    console.print(table)


def _table(title: str, found: dict[str, Distribution]) -> Table:
    table = Table(title, "mean", *(NAMES[name] for name in QUANTILES), "smallest", "largest seen")
    for name, each in found.items():
        show = percent if name == "fill" else number
        mean_cell = f"{show(each.mean.value)} {error(each.mean, show)}".rstrip()
        cells = [
            f"{show(at.value)} ({bounds(at, show)})".removesuffix(" ()") for at in each.quantiles.values()
        ]
        table.add_row(name, mean_cell, *cells, show(each.least), show(each.most))
    return table


# --- Numbers as text ----------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Formats a number with at most four significant digits below 1,000, and as a whole number above."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def percent(value: float) -> str:
    return f"{value:.2%}"


def error(estimate: Estimate, show: Callable[[float], str] = number) -> str:
    """Formats the half-width of a mean's interval; empty if the mean is exact."""
    if estimate.exact:
        return ""
    return "± unknown" if estimate.high is None else f"± {show(estimate.high - estimate.value)}"


def bounds(estimate: Estimate, show: Callable[[float], str] = number) -> str:
    """Formats a quantile's interval; empty if both bounds are the same number."""
    if estimate.low is None:
        return "bounds unknown" if estimate.high is None else f"≤ {show(estimate.high)}"
    if estimate.high is None:
        return f"≥ {show(estimate.low)}"
    low, high = show(estimate.low), show(estimate.high)
    return "" if low == high else f"{low} to {high}"


def shares(estimate: Estimate) -> str:
    """Formats a share of samples with its interval."""
    if estimate.exact:
        return percent(estimate.value)
    return f"{percent(estimate.value)} ({percent(estimate.low or 0)} to {percent(estimate.high or 1)})"


def printable(text: str) -> str:
    """Spells out characters that a terminal or a page would act on or hide.

    These are control characters, and marks that change the direction of writing.
    """
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
