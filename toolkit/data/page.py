"""Writes the pages of ``megatron-vl data stats`` and ``inspect``: one HTML file with embedded pictures, no
scripts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from data_tools.sample_sources import SourceError
from data_tools.statistics import SAMPLE_QUANTITIES, DatasetStatistics, SourceSizes, describe_values
from megatron_vl import durable_files
from megatron_vl.errors import UserError
from toolkit.html_templates import jpeg_base64, template_environment

from .prepared_dataset import PreparedDataset
from .sample_view import SampleView, runs_text, view_sample, visible_text, whole_characters
from .stats import (
    MAX_DETAIL_CHARACTERS,
    MAX_EXAMPLES,
    ReasonExamples,
    escape_unprintable,
    format_number,
    format_percent,
    read_quarantine_reasons,
    stats_sentences,
    stats_tables,
)

MAX_MEDIA_SHOWN = 8
"""Largest number of a sample's pictures and videos on the page."""
MAX_FRAMES_SHOWN = 8
"""Largest number of a video's frames on the page."""
MAX_PICTURE_SIDE = 360
"""Largest side in pixels of a picture on the page."""
TOKENS_SHOWN = (700, 200)
"""Numbers of tokens that are shown at the start and at the end of a long sample."""
MAX_BARS = 30
"""Largest number of bars in a histogram."""


def write_stats(
    prepared: PreparedDataset, statistics: DatasetStatistics, num_shown: int, html_path: Path
) -> None:
    """Writes the page of a data set, with ``num_shown`` of its samples."""
    cards = []
    for why, source_sizes, sample_number in choose_samples(statistics, num_shown):
        source = source_sizes.source
        cards.append(_sample_card(why, view_sample(prepared, source, source.indices[sample_number])))

    quarantine_reasons = {}
    for source_sizes in statistics.sources:
        source = source_sizes.source
        quarantine_reasons[source.name] = read_quarantine_reasons(source.dataset.path)

    run_dir = prepared.config.checkpoint.dir
    page_facts = {
        "tables": stats_tables(statistics),
        "charts": _quantity_charts(statistics),
        "sentences": stats_sentences(prepared, statistics),
        "left_out": _left_out_examples(prepared, statistics),
        "quarantined": quarantine_reasons,
        "run_skipped": read_quarantine_reasons(Path(run_dir)) if run_dir else {},
    }
    _write_page(html_path, prepared, cards, page_facts)


def write_sample(prepared: PreparedDataset, sample: SampleView, html_path: Path) -> None:
    """Writes the page of one sample."""
    _write_page(html_path, prepared, [_sample_card("", sample)], None)


def _write_page(
    html_path: Path, prepared: PreparedDataset, cards: list[dict[str, Any]], stats: dict[str, Any] | None
) -> None:
    """Writes a page. Text from the data is escaped, and characters that cannot be seen are spelled out."""
    environment = template_environment(Path(__file__).parent)
    environment.filters |= {
        "printable": escape_unprintable,
        "visible": visible_text,
        "text": runs_text,
        "number": format_number,
    }
    page = environment.get_template("page.html.jinja").render(
        path=prepared.dataset_location,
        split=prepared.split,
        settings=_page_settings(prepared),
        cards=cards,
        stats=stats,
    )
    try:
        html_path.parent.mkdir(parents=True, exist_ok=True)
        durable_files.write_file(html_path, (page + "\n").encode(errors="backslashreplace"))
    except OSError as error:
        raise UserError(
            f"--html {html_path} cannot be written ({error.strerror}); "
            "give a file that this user may write to"
        ) from error


def _page_settings(prepared: PreparedDataset) -> dict[str, str]:
    data = prepared.config.data
    names = ("max_patches", "min_pixels", "max_pixels", "video_fps", "video_max_frames", "video_max_pixels")
    return {
        "data set": f"{prepared.dataset_location}, {prepared.split}",
        "processor": f"{prepared.processor_dir}, {prepared.spec.family}",
        "rows": f"seq_len {data.seq_len:,}, " + ("packed" if data.pack else "one sample each"),
        "limits": ", ".join(f"{name} {value:g}" for name in names if (value := getattr(data, name))),
    }


# --- Distributions ------------------------------------------------------------------------------------------


def _quantity_charts(statistics: DatasetStatistics) -> dict[str, list[tuple[float, str]]]:
    """The histograms by their titles, without those of nothing."""
    bars_by_title = {}
    for name in SAMPLE_QUANTITIES:
        bars_by_title[f"{name} of a sample"] = histogram_bars(*statistics.sample_quantity(name))

    for name, values in statistics.row_quantities.items():
        chart_title, chart_values = ("fill in %", 100 * values + 1e-9) if name == "fill" else (name, values)
        bars_by_title[f"{chart_title} of a row"] = histogram_bars(
            chart_values.astype(int), np.full(len(values), 1 / len(values))
        )
    return {chart_title: bars for chart_title, bars in bars_by_title.items() if bars}


def histogram_bars(values: NDArray[np.int64], value_weights: NDArray[np.float64]) -> list[tuple[float, str]]:
    """The bars, each with its share of all values and a label; none if all values are 0.

    The last bar has the values above the 99 % quantile too.
    """
    if not values.any():
        return []
    upper_quantile = int(describe_values(values, value_weights)["p99"])
    bin_edges = np.unique(np.linspace(values.min(), upper_quantile + 1, MAX_BARS + 1).astype(int))
    shares, _ = np.histogram(np.minimum(values, upper_quantile), bin_edges, weights=value_weights)

    labels = []
    for left_edge, right_edge in pairwise(bin_edges.tolist()):
        label = format_number(left_edge)
        if right_edge > left_edge + 1:
            label += f" to {format_number(right_edge - 1)}"
        labels.append(label)
    if values.max() > upper_quantile:
        labels[-1] += " or more"

    bars: list[tuple[float, str]] = []
    for share, label in zip(shares.tolist(), labels, strict=True):
        bars.append((share, f"{label}: {format_percent(share)}"))
    return bars


# --- Samples ------------------------------------------------------------------------------------------------


def _sample_card(why: str, sample: SampleView) -> dict[str, Any]:
    """What the page shows of a sample: of a long one, the first and the last tokens."""
    num_first, num_last = TOKENS_SHOWN
    groups = whole_characters(sample.token_runs)
    shown_parts = (
        [groups] if len(groups) <= num_first + num_last else [groups[:num_first], groups[-num_last:]]
    )
    num_shown = sum(run.count for part in shown_parts for group in part for run in group)
    return {
        "why": why,
        "sample": sample,
        "media": [(medium, _frame_pictures(medium.pixels)) for medium in sample.media[:MAX_MEDIA_SHOWN]],
        "unshown_media": max(0, len(sample.media) - MAX_MEDIA_SHOWN),
        "tokens": shown_parts,
        "unshown_tokens": len(sample.token_ids) - num_shown,
    }


def choose_samples(statistics: DatasetStatistics, num_shown: int) -> list[tuple[str, SourceSizes, int]]:
    """Chooses usable samples to show: the largest ones, then some at equal distances.

    Returns:
        Why each is shown, its source, and its number there.
    """
    usable_sources = [source_sizes for source_sizes in statistics.sources if source_sizes.usable_mask.any()]
    chosen_samples: dict[tuple[str, int], tuple[str, SourceSizes, int]] = {}
    for name in SAMPLE_QUANTITIES:
        # The sample with the most of a quantity, over all sources; the first one of equal samples.
        largest_size = 0
        for source_sizes in usable_sources:
            usable_sizes = np.where(source_sizes.usable_mask, source_sizes.sizes[name], -1)
            if usable_sizes.max() > largest_size:
                largest_size = usable_sizes.max()
                largest_sample = (f"the most {name}", source_sizes, int(usable_sizes.argmax()))
        if largest_size:
            _, source_sizes, sample_number = largest_sample
            chosen_samples.setdefault((source_sizes.source.name, sample_number), largest_sample)

    for source_sizes in usable_sources:
        usable_numbers = np.flatnonzero(source_sizes.usable_mask)
        num_per_source = min(-(-num_shown // len(usable_sources)), len(usable_numbers))
        chosen_positions = np.linspace(0, len(usable_numbers) - 1, num_per_source).astype(int)
        for sample_number in usable_numbers[chosen_positions].tolist():
            chosen_samples.setdefault(
                (source_sizes.source.name, sample_number), ("one of all", source_sizes, sample_number)
            )
    return list(chosen_samples.values())[:num_shown]


def _frame_pictures(pixels: Tensor | None) -> list[str]:
    """Frames as JPEG in base64. If there are many, they are chosen at equal distances."""
    if pixels is None:
        return []
    frames = np.linspace(0, len(pixels) - 1, min(len(pixels), MAX_FRAMES_SHOWN)).round().astype(int)
    picture_side = MAX_PICTURE_SIDE if len(frames) == 1 else MAX_PICTURE_SIDE // 2

    frame_pictures: list[str] = []
    for frame_index in frames:
        frame = pixels[int(frame_index)].permute(1, 2, 0).numpy()
        frame_pictures.append(jpeg_base64(Image.fromarray(frame), (picture_side, picture_side)))
    return frame_pictures


def _left_out_examples(prepared: PreparedDataset, statistics: DatasetStatistics) -> ReasonExamples:
    """Why a run leaves out samples. Examples are read, to say what is wrong with them."""
    left_out_reasons: ReasonExamples = {}
    for reason, count in statistics.left_out_reasons().most_common():
        left_out_reasons[reason] = (count, [])

    for source_sizes in statistics.sources:
        for left_out_mask in source_sizes.left_out_masks.values():
            for sample_number in np.flatnonzero(left_out_mask)[:MAX_EXAMPLES].tolist():
                try:
                    sample = view_sample(
                        prepared, source_sizes.source, source_sizes.source.indices[sample_number]
                    )
                except SourceError:  # its description excludes it
                    continue
                if sample.problem and sample.problem[0] in left_out_reasons:
                    sample_origin = f"{sample.key} of {sample.shard} ({sample.record})"
                    left_out_reasons[sample.problem[0]][1].append(
                        (sample_origin, sample.problem[1][:MAX_DETAIL_CHARACTERS])
                    )
    return left_out_reasons
