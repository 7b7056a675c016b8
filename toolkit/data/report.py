"""Writes the page of ``megatron-vl data report``: one HTML file with embedded pictures, no scripts."""

from __future__ import annotations

import base64
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image
from torch import Tensor

from data_tools.estimates import Stratum, quantile
from data_tools.survey import SAMPLE_QUANTITIES, Drawn, Source, Survey, SurveyError, SurveyRow, values_of
from megatron_vl import durable
from megatron_vl.data.location import Location

from .prepared import Prepared
from .sample import MediumView, Run, SampleView, Viewer, text_of, visible, whole_characters
from .stats import (
    NAMES,
    Distribution,
    basis,
    bounds,
    error,
    number,
    of_rows,
    of_samples,
    percent,
    printable,
    row_quantities,
    rows_basis,
    shares,
)

ROWS_SHOWN = 24
"""Number of rows on the page."""
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
"""Approximate number of bars in a histogram."""
DETAIL = 400
"""Largest number of characters in a detail."""


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram, in units of the chart."""

    x: float
    width: float
    height: float
    label: str


@dataclass(frozen=True)
class Chart:
    """A histogram."""

    title: str
    bars: list[Bar]
    first: str
    last: str
    most: str
    """Share of the values in the highest bar."""


@dataclass(frozen=True)
class Piece:
    """A sample within the bar of a row. All widths are shares of the row."""

    start: float
    media: float
    text: float
    learnt: float
    label: str


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


def write_report(prepared: Prepared, found: Survey, shown: int, out: Path) -> None:
    """Writes the page. Text from the data is escaped, and characters that cannot be seen are spelled out."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"printable": printable, "visible": visible, "text": text_of, "number": number}

    page = environment.get_template("report.html.jinja").render(
        found=found,
        basis=basis(found),
        rows_basis=rows_basis(found),
        settings=_settings(prepared, found),
        sample_table=_table(of_samples(found)),
        row_table=_table(of_rows(found)),
        sample_charts=_charts(found.of_samples, SAMPLE_QUANTITIES),
        row_charts=_charts(found.of_rows, row_quantities(found.seq_len)),
        rows=[_pieces(row, found, prepared) for row in found.rows[:ROWS_SHOWN]],
        cards=list(_cards(prepared, found, shown)),
        quarantined=[(source.name, *quarantined(source)) for source in found.sources],
        skipped=_skipped(found),
        run_skipped=run_skipped(prepared.config.checkpoint.dir),
    )

    out.parent.mkdir(parents=True, exist_ok=True)
    durable.write(out, (page + "\n").encode(errors="backslashreplace"))


def _settings(prepared: Prepared, found: Survey) -> list[tuple[str, str]]:
    data = prepared.config.data
    pixels = {
        name: getattr(data, name)
        for name in ("min_pixels", "max_pixels", "video_fps", "video_max_frames", "video_max_pixels")
    }
    names = ", ".join(f"{name} {value:g}" for name, value in pixels.items() if value)

    return [
        ("data set", str(found.path)),
        ("split", found.split),
        ("processor", str(prepared.processor)),
        ("model", prepared.spec.family),
        ("rows", f"seq_len {data.seq_len:,}, " + ("packed" if data.pack else "one sample each")),
        ("limits", (f"max_patches {data.max_patches:,}, " if data.max_patches else "") + names),
        *(
            (f"source {source.name}", f"{len(source):,} samples, {source.share:.2%} of training")
            for source in found.sources
            if len(found.sources) > 1
        ),
    ]


# --- Distributions ------------------------------------------------------------------------------------------


def _table(found: dict[str, Distribution]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Names of quantities, each with the head, number and interval of its cells."""
    lines = []
    for name, each in found.items():
        show = percent if name == "fill" else number
        cells = [("mean", show(each.mean.value), error(each.mean, show))]
        cells += [(NAMES[key], show(at.value), bounds(at, show)) for key, at in each.quantiles.items()]
        cells += [("smallest", show(each.least), ""), ("largest seen", show(each.most), "")]
        lines.append((name, cells))
    return lines


def _charts[Thing](
    strata_of: Callable[[Callable[[Thing], float]], list[Stratum]],
    quantities: dict[str, Callable[[Thing], float]],
) -> list[Chart]:
    return [chart for name, of in quantities.items() if (chart := histogram(name, strata_of(of)))]


def histogram(title: str, strata: list[Stratum]) -> Chart | None:
    """Makes a histogram; None if all values are 0. Values above the 99 % quantile share a bar."""
    values, weights = values_of(strata)
    if not values.any():
        return None

    show = percent if title == "fill" else number
    low, high = float(values.min()), quantile(strata, 0.99).value
    whole = bool((values == values.round()).all())
    width = max((high - low) / BARS, 1e-3)
    if whole:
        width = float(math.ceil((high - low + 1) / BARS))
    number_of_bars = max(1, math.ceil((high - low + (1 if whole else 0)) / width - 1e-9))
    bar = np.minimum((values - low) // width, number_of_bars).astype(int)
    if not whole:  # the largest value belongs to the last bar
        bar = np.where(values <= high, np.minimum(bar, number_of_bars - 1), number_of_bars)

    heights = np.bincount(bar, weights, number_of_bars + 1)
    most = float(heights.max())
    total = number_of_bars + (1 if heights[-1] else 0)
    bars = []
    for i in range(total):
        start = low + i * width
        end = start + width - (1 if whole else 0)
        span = show(start) if start == end else f"{show(start)} to {show(end)}"
        label = f"more than {show(end - width)}" if i == number_of_bars else span
        bars.append(Bar(i / total, 1 / total, heights[i] / most, f"{label}: {percent(float(heights[i]))}"))
    return Chart(title, bars, show(low), show(float(values.max())), percent(most))


# --- Rows ---------------------------------------------------------------------------------------------------


def _pieces(row: SurveyRow, found: Survey, prepared: Prepared) -> list[Piece]:
    pieces = []
    start = 0
    for sample in row.samples:
        media = sum(grid.tokens(prepared.spec.vision.spatial_merge_size) for grid in sample.grids)
        text = sample.tokens - media - sample.learnt
        label = (
            f"{sample.key}: {sample.tokens:,} tokens, {media:,} of pictures and videos,"
            f" {sample.learnt:,} learnt; {sample.patches:,} patches"
        )
        whole = found.seq_len
        pieces.append(Piece(start / whole, media / whole, text / whole, sample.learnt / whole, label))
        start += sample.tokens
    return pieces


# --- Samples ------------------------------------------------------------------------------------------------


def _cards(prepared: Prepared, found: Survey, shown: int) -> Iterator[Card]:
    viewer = Viewer(prepared)
    for why, drawn in chosen(found.usable, shown):
        try:
            sample = viewer.view(found.sources[drawn.source], drawn.index)
        except SurveyError:  # it was excluded after it was drawn
            continue

        media = sample.media[:MEDIA_SHOWN]
        first, last = TOKENS_SHOWN
        groups = whole_characters(sample.runs)
        parts = [groups] if len(groups) <= first + last else [groups[:first], groups[-last:]]
        yield Card(
            why,
            sample,
            [(each, _pictures(each.pixels)) for each in media],
            len(sample.media) - len(media),
            parts,
            len(sample.token_ids) - sum(run.count for part in parts for group in part for run in group),
        )


def chosen(usable: list[Drawn], shown: int) -> list[tuple[str, Drawn]]:
    """Chooses the samples to show, each with the reason: extremes, then those that were drawn first."""
    found = [
        ("the most tokens of those drawn", max(usable, key=lambda sample: sample.tokens)),
        ("the most patches of those drawn", max(usable, key=lambda sample: sample.patches)),
        *[("the first drawn with a video", sample) for sample in usable if sample.videos][:1],
        *[("drawn at random", sample) for sample in usable[: shown + 3]],
    ]
    seen: set[tuple[int, int]] = set()
    once = []
    for why, sample in found:
        if (sample.source, sample.index) not in seen:
            seen.add((sample.source, sample.index))
            once.append((why, sample))
    return once[:shown]


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


def _skipped(found: Survey) -> list[Reason]:
    """Lists the reasons for which the loader would leave out some of the drawn samples."""
    reasons: list[Reason] = []
    for name, estimate in found.skipped().items():
        hits = [sample for sample in found.samples if sample.refused and sample.refused[0] == name]
        examples = [
            (_origin(found, sample), sample.refused[1][:DETAIL])
            for sample in hits[:EXAMPLES]
            if sample.refused
        ]
        reasons.append(Reason(name, shares(estimate), examples))
    return reasons


def _origin(found: Survey, sample: Drawn) -> str:
    """Names a sample by its key, shard and record."""
    shard, _ = found.sources[sample.source].place(sample.index)
    return f"{sample.key} of {shard}" + (f" ({sample.record})" if sample.record else "")


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
