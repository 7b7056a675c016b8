"""What a data set holds, as tables and as JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from data_tools.convert import default_workers
from data_tools.sample_sizes import index_datasets
from data_tools.sample_sources import list_splits
from data_tools.statistics import (
    SAMPLE_QUANTITIES,
    DatasetStatistics,
    SourceSizes,
    count_statistics,
    describe_pass,
    describe_values,
)
from megatron_vl.data.source.location import Location

from .prepared_dataset import PreparedDataset

MAX_EXAMPLES = 3
"""Largest number of examples for each reason."""
QUARANTINE_READ_BYTES = 64 << 20
"""Number of bytes of a quarantine.jsonl that are read."""
MAX_DETAIL_CHARACTERS = 400

type SplitStatistics = dict[str, DatasetStatistics]
type ReasonExamples = dict[str, tuple[int, list[tuple[str, str]]]]
"""Why samples or records are missing: how many, and examples with their details."""


def count_splits(prepared: PreparedDataset) -> SplitStatistics:
    """Counts all samples of each split. Sizes that are missing are written first."""
    index_datasets(prepared.config.data, prepared.spec, prepared.processor_dir, default_workers())
    statistics = {}
    for split in list_splits(prepared.dataset_location):
        statistics[split] = count_statistics(prepared.row_encoder, prepared.processor_dir, split)
    return statistics


def _distributions(statistics: DatasetStatistics) -> dict[str, dict[str, float]]:
    """Distributions of the usable samples, each counted as often as training draws it, and of packed rows."""
    described = {
        f"{name} of a sample": describe_values(*statistics.sample_quantity(name))
        for name in SAMPLE_QUANTITIES
    }
    for name, values in statistics.row_quantities.items():
        described[f"{name} of a row"] = describe_values(values)
    return described


def _source_facts(source_sizes: SourceSizes) -> dict[str, Any]:
    """What a source holds. Sums are those of its usable samples."""
    sums = {name: int(source_sizes.sizes[name][source_sizes.usable_mask].sum()) for name in SAMPLE_QUANTITIES}
    return {
        "share": round(source_sizes.source.share, 6),
        "samples": len(source_sizes.source),
        "usable": source_sizes.meter.used_count,
        **sums,
        "turns": source_sizes.assistant_turns,
    }


def statistics_as_json(prepared: PreparedDataset, statistics: SplitStatistics) -> dict[str, Any]:
    """The output of ``--json``."""
    splits = {}
    for split, counted in statistics.items():
        splits[split] = {
            "samples": counted.num_samples,
            "usable": counted.num_usable,
            "sources": {each.source.name: _source_facts(each) for each in counted.sources},
            "distributions": _distributions(counted),
            "pass": counted.pass_facts(prepared.config.global_batch_size),
            "left_out": dict(counted.left_out_reasons()),
        }
    quarantined = {}
    for name, reasons in quarantined_records(statistics).items():
        quarantined[name] = {reason: count for reason, (count, _) in reasons.items()}
    return {
        "data": str(prepared.dataset_location),
        "seq_len": prepared.config.data.seq_len,
        "splits": splits,
        "quarantined": quarantined,
    }


def statistics_tables(counted: DatasetStatistics) -> list[dict[str, dict[str, str]]]:
    """The tables: name of a line -> head of a column -> cell."""
    sources = {}
    for source_sizes in counted.sources:
        facts = _source_facts(source_sizes)
        cells = {key: "unknown" if value is None else format_number(value) for key, value in facts.items()}
        sources[source_sizes.source.name] = cells | {"share": f"{facts['share']:.2%}"}
    distributions = {}
    for name, values in _distributions(counted).items():
        format_value = "{:.2%}".format if name.startswith("fill") else format_number
        distributions[name] = {key: format_value(value) for key, value in values.items()}
    return [sources, distributions]


def statistics_sentences(prepared: PreparedDataset, counted: DatasetStatistics) -> list[str]:
    """What tables cannot say: how long a pass is, and what is missing."""
    sentences = [describe_pass(counted.pass_facts(prepared.config.global_batch_size))]
    for reason, count in counted.left_out_reasons().most_common():
        sentences.append(f"left out: {count:,} ({count / counted.num_samples:.2%}) {reason}")
    return sentences


def print_statistics(prepared: PreparedDataset, statistics: SplitStatistics) -> None:
    console = Console(highlight=False, width=max(100, Console().width))

    def print_line(line_text: str) -> None:
        console.print(escape_unprintable(line_text), markup=False, soft_wrap=True)

    for split, counted in statistics.items():
        print_line(
            f"{prepared.dataset_location}: {counted.num_samples:,} samples of {split},"
            f" {counted.num_usable:,} usable"
        )
        for lines in statistics_tables(counted):
            table = Table("", *next(iter(lines.values())))
            for name, cells in lines.items():
                table.add_row(escape_unprintable(name), *cells.values())
            console.print(table)
        for sentence in statistics_sentences(prepared, counted):
            print_line(sentence)
    for name, reasons in quarantined_records(statistics).items():
        for reason, (count, _) in reasons.items():
            print_line(f"quarantined by the conversion of {name}: {count:,} {reason}")


def quarantined_records(statistics: SplitStatistics) -> dict[str, ReasonExamples]:
    """The records that conversions left out, by data set."""
    datasets = {
        str(each.source.dataset.path): each.source.dataset.path
        for counted in statistics.values()
        for each in counted.sources
    }
    return {name: reasons for name, path in datasets.items() if (reasons := read_quarantine(path))}


def read_quarantine(quarantine_dir: Location) -> ReasonExamples:
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
            reason, detail = str(entry["reason"]), str(entry["detail"])
        except (ValueError, KeyError, TypeError, RecursionError):  # incomplete or damaged
            continue
        # A record of an input file, or a sample of a shard.
        names = ("file", "record", "id", "field") if "file" in entry else ("key", "shard", "source", "step")
        origin = ", ".join(f"{name} {entry[name]}" for name in names if entry.get(name) not in (None, ""))
        count, examples = reason_examples.get(reason, (0, []))
        if count < MAX_EXAMPLES:
            examples.append((origin[:MAX_DETAIL_CHARACTERS], detail[:MAX_DETAIL_CHARACTERS]))
        reason_examples[reason] = (count + 1, examples)
    return dict(sorted(reason_examples.items(), key=lambda item: -item[1][0]))


def format_number(value: float) -> str:
    """Formats a number with at most four significant digits below 1,000, and as a whole number above."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def escape_unprintable(text: str) -> str:
    """Spells out characters that a terminal or a page would act on or hide.

    These are control characters, and marks that change the direction of writing.
    """
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
