"""Writes the pages of ``megatron-vl data stats`` and ``inspect``: one HTML file with embedded pictures, no
scripts."""

from __future__ import annotations

import base64
import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from data_tools.sources import SourceError
from data_tools.statistics import QUANTITIES, SourceSizes, Statistics, distribution
from megatron_vl import durable
from megatron_vl.errors import UserError
from toolkit.pages import templates

from .prepared import Prepared
from .sample import SampleView, text_of, view, visible, whole_characters
from .stats import DETAIL, EXAMPLES, Reasons, number, percent, printable, quarantined, sentences, tables

MEDIA_SHOWN = 8
"""Largest number of a sample's pictures and videos on the page."""
FRAMES_SHOWN = 8
"""Largest number of a video's frames on the page."""
SIDE = 360
"""Largest side in pixels of a picture on the page."""
TOKENS_SHOWN = (700, 200)
"""Numbers of tokens that are shown at the start and at the end of a long sample."""
BARS = 30
"""Largest number of bars in a histogram."""


def write_stats(prepared: Prepared, found: Statistics, shown: int, out: Path) -> None:
    """Writes the page of a data set, with ``shown`` of its samples."""
    cards = [
        _card(why, view(prepared, one.source, one.source.indices[at]))
        for why, one, at in chosen(found, shown)
    ]
    run = prepared.config.checkpoint.dir
    facts = {
        "tables": tables(found),
        "charts": _charts(found),
        "sentences": sentences(prepared, found),
        "left_out": _left_out(prepared, found),
        "quarantined": {one.source.name: quarantined(one.source.data.path) for one in found.sources},
        "run_skipped": quarantined(Path(run)) if run else {},
    }
    _write(out, prepared, cards, facts)


def write_sample(prepared: Prepared, sample: SampleView, out: Path) -> None:
    """Writes the page of one sample."""
    _write(out, prepared, [_card("", sample)], None)


def _write(out: Path, prepared: Prepared, cards: list[dict[str, Any]], stats: dict[str, Any] | None) -> None:
    """Writes a page. Text from the data is escaped, and characters that cannot be seen are spelled out."""
    environment = templates(Path(__file__).parent)
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
    for name, values in found.of_rows.items():
        title, whole = ("fill in %", 100 * values + 1e-9) if name == "fill" else (name, values)
        charts[f"{title} of a row"] = histogram(whole.astype(int), np.full(len(values), 1 / len(values)))
    return {title: bars for title, bars in charts.items() if bars}


def histogram(values: NDArray[np.int64], weights: NDArray[np.float64]) -> list[tuple[float, str]]:
    """The bars, each with its share of all values and a label; none if all values are 0.

    The last bar has the values above the 99 % quantile too.
    """
    if not values.any():
        return []
    high = int(distribution(values, weights)["p99"])
    edges = np.unique(np.linspace(values.min(), high + 1, BARS + 1).astype(int))
    shares, _ = np.histogram(np.minimum(values, high), edges, weights=weights)
    labels = [
        number(a) if b == a + 1 else f"{number(a)} to {number(b - 1)}" for a, b in pairwise(edges.tolist())
    ]
    if values.max() > high:
        labels[-1] += " or more"
    return [
        (share, f"{label}: {percent(share)}") for share, label in zip(shares.tolist(), labels, strict=True)
    ]


# --- Samples ------------------------------------------------------------------------------------------------


def _card(why: str, sample: SampleView) -> dict[str, Any]:
    """What the page shows of a sample: of a long one, the first and the last tokens."""
    first, last = TOKENS_SHOWN
    groups = whole_characters(sample.runs)
    parts = [groups] if len(groups) <= first + last else [groups[:first], groups[-last:]]
    shown = sum(run.count for part in parts for group in part for run in group)
    return {
        "why": why,
        "sample": sample,
        "media": [(medium, _pictures(medium.pixels)) for medium in sample.media[:MEDIA_SHOWN]],
        "unshown_media": max(0, len(sample.media) - MEDIA_SHOWN),
        "tokens": parts,
        "unshown_tokens": len(sample.token_ids) - shown,
    }


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


def _left_out(prepared: Prepared, found: Statistics) -> Reasons:
    """Why a run leaves out samples. Examples are read, to say what is wrong with them."""
    reasons: Reasons = {reason: (count, []) for reason, count in found.left_out().most_common()}
    for one in found.sources:
        for places in one.left_out.values():
            for at in np.flatnonzero(places)[:EXAMPLES].tolist():
                try:
                    sample = view(prepared, one.source, one.source.indices[at])
                except SourceError:  # its description excludes it
                    continue
                if sample.problem and sample.problem[0] in reasons:
                    origin = f"{sample.key} of {sample.shard} ({sample.record})"
                    reasons[sample.problem[0]][1].append((origin, sample.problem[1][:DETAIL]))
    return reasons
