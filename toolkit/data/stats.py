"""Shows what a data set holds as tables or JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from data_tools.statistics import (
    MAX_PACKED_SAMPLES,
    SAMPLE_QUANTITIES,
    DatasetStatistics,
    SourceSizes,
    describe_pass,
    describe_values,
)
from megatron_vl.data.source.location import Location

from .prepared_dataset import PreparedDataset

QUANTILE_NAMES = {"p5": "5 %", "p50": "median", "p95": "95 %", "p99": "99 %"}
MAX_EXAMPLES = 3
"""Largest number of examples for each reason."""
QUARANTINE_READ_BYTES = 64 << 20
"""Number of bytes of a quarantine.jsonl that are read."""
MAX_DETAIL_CHARACTERS = 400
"""Largest number of characters in a detail."""

type ReasonExamples = dict[str, tuple[int, list[tuple[str, str]]]]
"""Why samples or records are missing: how many, and examples with their details."""


def sample_distributions(statistics: DatasetStatistics) -> dict[str, dict[str, float]]:
    """Distributions of the usable samples, each counted as often as training draws it."""
    return {name: describe_values(*statistics.sample_quantity(name)) for name in SAMPLE_QUANTITIES}


def row_distributions(statistics: DatasetStatistics) -> dict[str, dict[str, float]]:
    return {name: describe_values(values) for name, values in statistics.row_quantities.items()}


def source_facts(source_sizes: SourceSizes) -> dict[str, Any]:
    """What a source holds. Sums are those of its usable samples."""
    quantity_sums = {}
    for name in SAMPLE_QUANTITIES:
        quantity_sums[name] = int(source_sizes.sizes[name][source_sizes.usable_mask].sum())

    return {
        "name": source_sizes.source.name,
        "share": round(source_sizes.source.share, 6),
        "samples": len(source_sizes.source),
        "usable": source_sizes.meter.used_count,
        **quantity_sums,
        "turns": source_sizes.assistant_turns,
    }


def stats_as_json(prepared: PreparedDataset, statistics: DatasetStatistics) -> dict[str, Any]:
    """The output of ``--json``."""
    quarantined: dict[str, dict[str, int]] = {}
    for source_sizes in statistics.sources:
        reason_counts = quarantined.setdefault(source_sizes.source.name, {})
        quarantine_reasons = read_quarantine_reasons(source_sizes.source.dataset.path)
        for reason, (count, _) in quarantine_reasons.items():
            reason_counts[reason] = count

    return {
        "data": str(prepared.dataset_location),
        "split": prepared.split,
        "seq_len": statistics.data_config.seq_len,
        "samples": statistics.num_samples,
        "usable": statistics.num_usable,
        "sources": list(map(source_facts, statistics.sources)),
        "per_sample": sample_distributions(statistics),
        "per_row": row_distributions(statistics),
        "pass": statistics.pass_facts(prepared.config.global_batch_size),
        "left_out": dict(statistics.left_out_reasons()),
        "quarantined": quarantined,
    }


def stats_sentences(prepared: PreparedDataset, statistics: DatasetStatistics) -> list[str]:
    """What tables cannot say: how rows are made, how long a pass is, and what is missing."""
    samples_text = (
        "all samples" if statistics.num_samples <= MAX_PACKED_SAMPLES else f"{MAX_PACKED_SAMPLES:,} samples"
    )
    sentences = [
        f"Rows of {statistics.data_config.seq_len:,} tokens are made "
        f"of {samples_text} in random order, as a loader makes them",
        describe_pass(statistics.pass_facts(prepared.config.global_batch_size)),
    ]
    for reason, count in statistics.left_out_reasons().most_common():
        share_text = format_percent(count / statistics.num_samples)
        sentences.append(f"left out: {count:,} ({share_text}) {reason}")
    for source_sizes in statistics.sources:
        source = source_sizes.source
        for reason, (count, _) in read_quarantine_reasons(source.dataset.path).items():
            sentences.append(f"quarantined by the conversion of {source.name}: {count:,} {reason}")
    return sentences


def print_stats(prepared: PreparedDataset, statistics: DatasetStatistics) -> None:
    console = Console(highlight=False, width=max(100, Console().width))

    def print_line(line_text: str) -> None:
        console.print(escape_unprintable(line_text), markup=False, soft_wrap=True)

    print_line(
        f"{prepared.dataset_location}: {statistics.num_samples:,} samples "
        f"of {prepared.split}, {statistics.num_usable:,} usable"
    )
    for table_title, table_lines in stats_tables(statistics).items():
        rich_table = Table(table_title, *table_lines[0][1], title_justify="left")
        for line_name, cells in table_lines:
            rich_table.add_row(escape_unprintable(line_name), *cells.values())
        console.print(rich_table)
    for sentence in stats_sentences(prepared, statistics):
        print_line(sentence)


def stats_tables(statistics: DatasetStatistics) -> dict[str, list[tuple[str, dict[str, str]]]]:
    """Title of a table -> its lines: a name, and cells by the head of their column."""
    tables = {"source": [_source_line(source_facts(source_sizes)) for source_sizes in statistics.sources]}
    for title, distributions in (
        ("of a sample", sample_distributions(statistics)),
        ("of a row", row_distributions(statistics)),
    ):
        tables[title] = []
        for name, distribution_values in distributions.items():
            tables[title].append((name, _distribution_cells(name, distribution_values)))
    return tables


def _source_line(line_facts: dict[str, Any]) -> tuple[str, dict[str, str]]:
    cells = {}
    for key, value in line_facts.items():
        if key != "name":
            cells[key] = "unknown" if value is None else format_number(value)

    return line_facts["name"], cells | {"share": format_percent(line_facts["share"])}


def _distribution_cells(quantity_name: str, distribution_values: dict[str, float]) -> dict[str, str]:
    format_value = format_percent if quantity_name == "fill" else format_number
    return {QUANTILE_NAMES.get(key, key): format_value(value) for key, value in distribution_values.items()}


def read_quarantine_reasons(quarantine_dir: Location) -> ReasonExamples:
    """Why the quarantine.jsonl of a data set or of a run lists what it lists, the most frequent first."""
    reason_examples: ReasonExamples = {}
    try:
        with (quarantine_dir / "quarantine.jsonl").open("rb") as quarantine_file:
            lines = quarantine_file.read(QUARANTINE_READ_BYTES).splitlines()
    except OSError:
        return reason_examples

    for line in lines:
        try:
            entry = json.loads(line)
            reason, detail = str(entry["reason"]), str(entry["detail"])[:MAX_DETAIL_CHARACTERS]
        except (ValueError, KeyError, TypeError, RecursionError):  # incomplete or damaged
            continue
        # A record of an input file, or a sample of a shard.
        origin_names = ("key", "shard", "source", "step")
        if "file" in entry:
            origin_names = ("file", "record", "id", "field")
        origin_text = ", ".join(
            f"{name} {entry[name]}" for name in origin_names if entry.get(name) not in (None, "")
        )
        count, examples = reason_examples.get(reason, (0, []))
        reason_examples[reason] = (
            count + 1,
            [*examples, (origin_text[:MAX_DETAIL_CHARACTERS], detail)][:MAX_EXAMPLES],
        )
    return dict(sorted(reason_examples.items(), key=lambda item: -item[1][0]))


# --- Numbers as text ----------------------------------------------------------------------------------------


def format_number(value: float) -> str:
    """Formats a number with at most four significant digits below 1,000, and as a whole number above."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def format_percent(value: float) -> str:
    return f"{value:.2%}"


def escape_unprintable(text: str) -> str:
    """Spells out characters that a terminal or a page would act on or hide.

    These are control characters, and marks that change the direction of writing.
    """
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
