"""Writes the page of ``megatron-vl data show``: one HTML file with embedded images, no scripts."""

import base64
import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from data_tools.sample_sources import SampleSource
from data_tools.statistics import SAMPLE_QUANTITIES, DatasetStatistics, describe_values
from megatron_vl.data.row_encoder import RowEncoder
from megatron_vl.system.errors import naming_file
from toolkit.common.html_templates import template_environment

from .sample_view import SampleView, view_sample
from .statistics import escape_unprintable, facts_sentences, format_number, quarantine_sentences

SAMPLES_SHOWN = 12
MAX_MEDIA_SHOWN = 8
"""Images and videos of a sample, and frames of a video."""
MAX_IMAGE_SIDE = 360


def write_page(
    encoder: RowEncoder,
    html_path: Path,
    facts: dict[str, Any],
    statistics: dict[str, DatasetStatistics],
    samples: list[SampleView],
) -> None:
    """Writes a page with the facts of :func:`~toolkit.data.statistics.dataset_facts`, ``samples``, and some
    samples of each split. Text from the data is escaped, and characters that cannot be seen are spelled out.
    """
    splits = {}
    for split, counted in statistics.items():
        bars = {name: histogram_bars(*counted.sample_quantity(name)) for name in SAMPLE_QUANTITIES}
        charts = {f"{name} of a sample": shares for name, shares in bars.items() if shares}
        split_of_facts = facts["splits"][split]
        splits[split] = split_of_facts | {"sentences": facts_sentences(split_of_facts), "charts": charts}
        samples += [view_sample(encoder, *chosen) for chosen in choose_samples(counted)]
    environment = template_environment(Path(__file__).parent)
    environment.filters |= {"printable": escape_unprintable, "number": format_number}
    page = environment.get_template("page.html.jinja").render(
        path=str(encoder.data_config.path),
        splits=splits,
        samples=samples,
        images=_frame_images,
        max_media=MAX_MEDIA_SHOWN,
        quarantined=quarantine_sentences(facts),
    )
    with naming_file(html_path):
        html_path.parent.mkdir(parents=True, exist_ok=True)
        html_path.write_text(page + "\n", encoding="utf-8", errors="backslashreplace")


def histogram_bars(values: NDArray[np.int64], value_weights: NDArray[np.float64]) -> list[tuple[float, str]]:
    """The bars, each with its share of all values and a label; none if all values are 0.

    The last bar has the values above the 99 % quantile too.
    """
    if not values.any():
        return []
    upper_quantile = int(describe_values(values, value_weights)["p99"])
    bin_edges = np.unique(np.linspace(values.min(), upper_quantile + 1, 31).astype(int))
    shares, _ = np.histogram(np.minimum(values, upper_quantile), bin_edges, weights=value_weights)
    bars: list[tuple[float, str]] = []
    for share, (left, right) in zip(shares.tolist(), pairwise(bin_edges.tolist()), strict=True):
        range_text = f" to {format_number(right - 1)}" if right > left + 1 else ""
        more_text = " or more" if right == bin_edges[-1] and values.max() > upper_quantile else ""
        bars.append((share, f"{format_number(left)}{range_text}{more_text}: {share:.2%}"))
    return bars


def choose_samples(counted: DatasetStatistics) -> list[tuple[SampleSource, int]]:
    """Usable samples to show, at equal distances in each source: (source, index there)."""
    usable = [
        (each.source, np.flatnonzero(each.usable_mask)) for each in counted.sources if each.usable_mask.any()
    ]
    return [
        (source, int(numbers[place]))
        for source, numbers in usable
        for place in np.linspace(
            0, len(numbers) - 1, min(len(numbers), -(-SAMPLES_SHOWN // len(usable)))
        ).astype(int)
    ]


def _frame_images(medium: dict[str, Any], pixels: Tensor | None) -> list[str]:
    """Frames with their boxes as JPEG in base64. If there are many, they are chosen at equal distances."""
    if pixels is None:
        return []
    frames = np.linspace(0, len(pixels) - 1, min(len(pixels), MAX_MEDIA_SHOWN)).round().astype(int)
    side = MAX_IMAGE_SIDE if len(frames) == 1 else MAX_IMAGE_SIDE // 2
    texts = []
    for frame in frames:
        image = Image.fromarray(pixels[int(frame)].permute(1, 2, 0).numpy())
        line_width = max(1, max(image.size) // side)
        for box in medium.get("boxes", ()):
            draw, edge = ImageDraw.Draw(image), 4 * line_width * (len(box) == 2)  # a point is a small square
            corners = [box[0] - edge, box[1] - edge, box[-2] + edge, box[-1] + edge]
            draw.rectangle(corners, outline="blue", width=line_width)
        image.thumbnail((side, side))
        image.save(jpeg := io.BytesIO(), "JPEG", quality=80)
        texts.append(base64.b64encode(jpeg.getvalue()).decode())
    return texts
