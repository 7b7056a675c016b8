"""Writes the pages of ``megatron-vl data stats`` and ``inspect``: one HTML file with embedded pictures, no
scripts."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from data_tools.sources import Reader, Source
from data_tools.statistics import QUANTITIES, SourceSizes, Statistics, distribution, pass_in_words
from megatron_vl import durable
from megatron_vl.data.location import Location
from megatron_vl.errors import UserError

from .prepared import Prepared
from .sample import MediumView, Run, SampleView, Viewer, text_of, visible, whole_characters
from .stats import number, percent, printable, rows_basis, tables

MEDIA_SHOWN = 8
"""Largest number of a sample's pictures and videos on the page."""
FRAMES_SHOWN = 8
"""Largest number of a video's frames on the page."""
SIDE = 360
"""Largest side in pixels of a picture on the page."""
TOKENS_SHOWN = (700, 200)
"""Numbers of tokens that are shown at the start and at the end of a long sample."""
EXAMPLES = 3
"""Largest number of examples for each reason."""
QUARANTINE_READ = 32 << 20
"""Number of bytes of a quarantine.jsonl that are searched for examples."""
BARS = 30
"""Largest number of bars in a histogram, without the one for the largest values."""
DETAIL = 400
"""Largest number of characters in a detail."""


@dataclass
class Reason:
    """A reason for which samples or records are missing."""

    name: str
    count: str
    examples: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of a sample or record and the detail."""


@dataclass(frozen=True)
class Card:
    """A sample on the page."""

    why: str
    """Why the sample is shown."""
    sample: SampleView
    media: list[tuple[MediumView, list[str]]]
    """Media with their pictures in base64."""
    unshown_media: int
    tokens: list[list[list[Run]]]
    """All tokens, or the first and the last ones, in groups that hold whole characters."""
    unshown_tokens: int


def write_stats(prepared: Prepared, found: Statistics, shown: int, out: Path) -> None:
    """Writes the page of a data set, with ``shown`` of its samples."""
    viewer = Viewer(prepared)
    cards = [
        _card(why, viewer.view(one.source, one.source.indices[at])) for why, one, at in chosen(found, shown)
    ]
    facts = {
        "tables": tables(found),
        "charts": _charts(found),
        "rows_basis": rows_basis(found),
        "one_pass": pass_in_words(found.one_pass(prepared.config.global_batch_size)),
        "left_out": _left_out(prepared, found),
        "quarantined": [(one.source.name, *quarantined(one.source)) for one in found.sources],
        "run_skipped": run_skipped(prepared.config.checkpoint.dir),
    }
    _write(out, prepared, cards, facts)


def write_sample(prepared: Prepared, sample: SampleView, out: Path) -> None:
    """Writes the page of one sample."""
    _write(out, prepared, [_card("", sample)], None)


def _write(out: Path, prepared: Prepared, cards: list[Card], stats: dict[str, Any] | None) -> None:
    """Writes a page. Text from the data is escaped, and characters that cannot be seen are spelled out."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"printable": printable, "visible": visible, "text": text_of, "number": number}
    page = environment.get_template("page.html.jinja").render(
        path=prepared.path, split=prepared.split, settings=_settings(prepared), cards=cards, stats=stats
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        durable.write(out, (page + "\n").encode(errors="backslashreplace"))
    except OSError as error:
        raise UserError(
            f"--html {out} cannot be written ({error.strerror}); give a file that this user may write to"
        ) from error


def _settings(prepared: Prepared) -> dict[str, str]:
    data = prepared.config.data
    names = ("max_patches", "min_pixels", "max_pixels", "video_fps", "video_max_frames", "video_max_pixels")
    return {
        "data set": f"{prepared.path}, {prepared.split}",
        "processor": f"{prepared.processor}, {prepared.spec.family}",
        "rows": f"seq_len {data.seq_len:,}, " + ("packed" if data.pack else "one sample each"),
        "limits": ", ".join(f"{name} {value:g}" for name in names if (value := getattr(data, name))),
    }


# --- Distributions ------------------------------------------------------------------------------------------


def _charts(found: Statistics) -> dict[str, list[tuple[float, str]]]:
    """The histograms by their titles, without those of nothing."""
    charts = {f"{name} of a sample": histogram(*found.of_samples(name)) for name in QUANTITIES}
    equal = np.full(len(found.rows), 1 / len(found.rows))
    for name, values in found.of_rows().items():
        title, whole = ("fill in %", 100 * values + 1e-9) if name == "fill" else (name, values)
        charts[f"{title} of a row"] = histogram(whole.astype(int), equal)
    return {title: bars for title, bars in charts.items() if bars}


def histogram(values: NDArray[np.int64], weights: NDArray[np.float64]) -> list[tuple[float, str]]:
    """The bars, each with its share of all values and a label; none if all values are 0.

    Values above the 99 % quantile share a bar.
    """
    if not values.any():
        return []
    known = distribution(values, weights)
    low, high = int(known["smallest"]), int(known["p99"])
    width = -(-(high - low + 1) // BARS)
    last = (high - low) // width
    shares = np.bincount(np.where(values > high, last + 1, (values - low) // width), weights, last + 2)

    spans = []
    for start in range(low, high + 1, width):
        end = min(start + width - 1, high)
        spans.append(number(start) if start == end else f"{number(start)} to {number(end)}")
    labels = [*spans, f"more than {number(high)}"]
    bars = [
        (share, f"{label}: {percent(share)}") for share, label in zip(shares.tolist(), labels, strict=True)
    ]
    return bars if bars[-1][0] else bars[:-1]


# --- Samples ------------------------------------------------------------------------------------------------


def _card(why: str, sample: SampleView) -> Card:
    media = sample.media[:MEDIA_SHOWN]
    first, last = TOKENS_SHOWN
    groups = whole_characters(sample.runs)
    parts = [groups] if len(groups) <= first + last else [groups[:first], groups[-last:]]
    return Card(
        why,
        sample,
        [(each, _pictures(each.pixels)) for each in media],
        len(sample.media) - len(media),
        parts,
        len(sample.token_ids) - sum(run.count for part in parts for group in part for run in group),
    )


def chosen(found: Statistics, shown: int) -> list[tuple[str, SourceSizes, int]]:
    """Chooses usable samples to show, each with the reason and its number in the source: the largest ones,
    then some at equal distances."""
    held = [one for one in found.sources if one.usable.any()]
    places: dict[tuple[str, int], tuple[str, SourceSizes, int]] = {}
    for name in QUANTITIES:
        tops = [(one, int(np.where(one.usable, one.sizes[name], -1).argmax())) for one in held]
        one, at = max(tops, key=lambda top: top[0].sizes[name][top[1]])
        if one.sizes[name][at]:
            places.setdefault((one.source.name, at), (f"the most {name}", one, at))
    for one in held:
        usable = np.flatnonzero(one.usable)
        each = min(-(-shown // len(held)), len(usable))
        for at in usable[np.linspace(0, len(usable) - 1, each).astype(int)].tolist():
            places.setdefault((one.source.name, at), ("one of all", one, at))
    return list(places.values())[:shown]


def _pictures(pixels: Tensor | None) -> list[str]:
    """Frames as JPEG in base64. If there are many, they are chosen at equal distances."""
    if pixels is None:
        return []
    frames = np.linspace(0, len(pixels) - 1, min(len(pixels), FRAMES_SHOWN)).round().astype(int)
    side = SIDE if len(frames) == 1 else SIDE // 2
    return [_encoded(Image.fromarray(pixels[int(at)].permute(1, 2, 0).numpy()), side) for at in frames]


def _encoded(picture: Image.Image, side: int) -> str:
    picture.thumbnail((side, side))
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=80)
    return base64.b64encode(data.getvalue()).decode()


# --- What is missing ----------------------------------------------------------------------------------------


def _left_out(prepared: Prepared, found: Statistics) -> list[Reason]:
    """Lists the reasons for which a run leaves out samples. Examples are read, to say what is wrong."""
    examples: dict[str, list[tuple[str, str]]] = {}
    for one in found.sources:
        reader = Reader(one.source, prepared.config.data.sample_timeout_s)
        for places in one.left_out.values():
            for at in np.flatnonzero(places)[:EXAMPLES].tolist():
                raw = reader.read(one.source.indices[at], whole=False)
                encoded = prepared.encoder.preencode_sample(raw) if raw else None
                if encoded and encoded.refused:
                    reason, detail = encoded.refused
                    origin = f"{encoded.__key__} of {encoded.shard} ({encoded.source})"
                    examples.setdefault(reason, []).append((origin, detail[:DETAIL]))
        reader.close()
    return [
        Reason(reason, f"{count:,}", examples.get(reason, [])[:EXAMPLES])
        for reason, count in found.left_out().most_common()
    ]


def quarantined(source: Source) -> tuple[int, list[Reason]]:
    """Returns the number of records that ``data convert`` left out, and the reasons with examples."""
    examples = _examples(source.data.path / "quarantine.jsonl")
    counts: Counter[str] = Counter()
    try:
        with (source.data.path / "report.json").open("rb") as file:
            stored = json.loads(file.read())
        for by_reason in stored["refused"].values():
            counts.update({str(reason): int(count) for reason, count in by_reason.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Without a report of the conversion, count the entries of the list.
        counts = Counter({reason: count for reason, (count, _) in examples.items()})
    return counts.total(), [
        Reason(reason, f"{count:,}", examples.get(reason, (0, []))[1])
        for reason, count in counts.most_common()
    ]


def run_skipped(folder: str) -> list[Reason]:
    """Lists the reasons in a run's ``quarantine.jsonl``, for which its loaders left out samples."""
    found = _examples(Path(folder) / "quarantine.jsonl") if folder else {}
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    return [Reason(reason, f"{count:,}", examples) for reason, (count, examples) in ordered]


def _examples(path: Location) -> dict[str, tuple[int, list[tuple[str, str]]]]:
    """Maps each reason in the first bytes of a quarantine.jsonl to its count and some examples."""
    found: dict[str, tuple[int, list[tuple[str, str]]]] = {}
    try:
        with path.open("rb") as file:
            lines = file.read(QUARANTINE_READ).splitlines()
    except OSError:
        return found

    for line in lines:
        try:
            entry = json.loads(line)
            reason, detail = str(entry["reason"]), str(entry["detail"])[:DETAIL]
        except (ValueError, KeyError, TypeError, RecursionError):  # incomplete or damaged
            continue

        count, examples = found.get(reason, (0, []))
        if len(examples) < EXAMPLES:
            examples.append((_named(entry), detail))
        found[reason] = (count + 1, examples)
    return found


def _named(entry: dict[str, Any]) -> str:
    """Names a record of an input file, or a sample of a shard."""
    if "file" in entry:
        where = f", {entry['field']}" if entry.get("field") else ""
        return f"{entry['file']}, record {entry.get('record')}{where}"[:DETAIL]
    origin = f" ({entry['source']})" if entry.get("source") else ""
    return f"{entry.get('key')} of {entry.get('shard')}{origin}, step {entry.get('step')}"[:DETAIL]
