"""What a data set holds, as tables and as JSON."""

import contextlib
import json
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from data_tools.statistics import SAMPLE_QUANTITIES, DatasetStatistics, describe_pass, describe_values
from megatron_vl.config import TrainConfig
from megatron_vl.data.source.location import Location
from megatron_vl.system.plurals import pluralize


def split_facts(config: TrainConfig, counted: DatasetStatistics) -> dict[str, Any]:
    """What a split holds, as JSON values. Sums are those of usable samples. A sample of a mixture counts
    in the distributions as often as training draws it."""
    return {
        "pass": counted.pass_facts(config.global_batch_size),  # it raises if no sample is usable
        "samples": counted.num_samples,
        "usable": counted.num_usable,
        "sources": {
            each.source.name: {
                "share": round(each.source.share, 6),
                "samples": len(each.source),
                "usable": each.num_usable,
                **{name: int(each.sizes[name][each.usable_mask].sum()) for name in SAMPLE_QUANTITIES},
                "turns": each.assistant_turns,
            }
            for each in counted.sources
        },
        "distributions": {
            f"{name} of a sample": describe_values(*counted.sample_quantity(name))
            for name in SAMPLE_QUANTITIES
        },
        "left_out": dict(counted.left_out_reasons()),
        "tokens": counted.token_counts(),
    }


def facts_sentences(facts: dict[str, Any]) -> list[str]:
    """What tables cannot say: how long a pass is, and what is missing."""
    sentences, tokens, cut = [describe_pass(facts["pass"])], facts["tokens"], facts["tokens"]["cut"]

    def count_of(name: str) -> str:
        return pluralize(f"{cut[name]:,}", name.removeprefix("lost_").removesuffix("s"))

    if cut["samples"]:
        cut_text = f"cut: {count_of('samples')} into {count_of('parts')} with {cut['tokens']:,} tokens"
        if cut["lost_exchanges"]:
            cut_text += f"; {count_of('lost_exchanges')} with {cut['lost_tokens']:,} tokens left out"
        sentences.append(f"{cut_text}; {tokens['whole']:,} tokens are in samples that are whole")
    for reason, count in facts["left_out"].items():
        sentences.append(f"left out: {count:,} ({count / facts['samples']:.2%}) {reason}")
        if lost_tokens := tokens["left_out"].get(reason):
            sentences[-1] += f", {lost_tokens:,} tokens"
    return sentences


def dataset_facts(config: TrainConfig, statistics: dict[str, DatasetStatistics]) -> dict[str, Any]:
    """The output of ``--json``. What conversions left out is there by data set."""
    sources = (each.source for counted in statistics.values() for each in counted.sources)
    paths = {str(source.dataset.path): source.dataset.path for source in sources}
    return {
        "data": str(config.data.path),
        "seq_len": config.data.seq_len,
        "splits": {split: split_facts(config, counted) for split, counted in statistics.items()},
        "quarantined": {name: reasons for name, path in paths.items() if (reasons := read_quarantine(path))},
    }


def print_facts(facts: dict[str, Any]) -> None:
    console = Console(highlight=False, width=max(100, Console().width))

    def print_line(line_text: str) -> None:
        console.print(escape_unprintable(line_text), markup=False, soft_wrap=True)

    for split, found in facts["splits"].items():
        print_line(f"{facts['data']}: {found['samples']:,} samples of {split}, {found['usable']:,} usable")
        for lines in (found["sources"], found["distributions"]):
            table = Table("", *next(iter(lines.values())))
            for name, values in lines.items():
                table.add_row(escape_unprintable(name), *map(format_number, values.values()))
            console.print(table)
        print_line("\n".join(facts_sentences(found)))
    for sentence in quarantine_sentences(facts):
        print_line(sentence)


def quarantine_sentences(facts: dict[str, Any]) -> list[str]:
    return [
        f"quarantined in {name}: {count:,} {reason}"
        for name, reasons in facts["quarantined"].items()
        for reason, count in reasons.most_common()
    ]


def read_quarantine(dataset: Location) -> Counter[str]:
    reasons: Counter[str] = Counter()
    with contextlib.suppress(OSError), (dataset / "quarantine.jsonl").open("rb") as quarantine_file:
        for line in quarantine_file:
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # damaged
                reasons[str(json.loads(line)["reason"])] += 1
    return reasons


def format_number(value: float) -> str:
    """Formats a number with at most four significant digits below 1,000, and as a whole number above."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def escape_unprintable(text: object) -> str:
    """Spells out characters that a terminal or a page would act on or hide: control characters but ends of
    lines and tabs, and marks that change the direction of writing. Chinese and French spaces stay."""
    return "".join(
        c if c.isprintable() or c in "\n\t\u3000\u00a0\u202f" else f"\\u{ord(c):04x}" for c in str(text)
    )
