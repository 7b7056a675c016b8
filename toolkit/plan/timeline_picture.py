"""Draws the timeline of a pipeline: a bar for each pass, a line for each stage."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from megatron_vl import durable_files
from megatron_vl.planning.layout_search import describe_layout
from megatron_vl.planning.pipeline_timeline import PassSpan
from megatron_vl.planning.predict import RunPrediction

FORWARD_COLORS, BACKWARD_COLORS = "Blues", "Oranges"
"""Colour maps; chunks are shades of them."""
MAX_NUMBERED_PASSES = 400
"""With at most this many passes, each bar shows the number of its micro-batch."""


def _draw_pass(axes: Any, pass_span: PassSpan, bar_color: Any, *, with_number: bool) -> None:
    axes.barh(
        pass_span.pipeline_stage,
        pass_span.end_seconds - pass_span.start_seconds,
        left=pass_span.start_seconds,
        height=0.86,
        color=bar_color,
        edgecolor="white",
        linewidth=0.4,
    )
    if with_number:
        axes.text(
            (pass_span.start_seconds + pass_span.end_seconds) / 2,
            pass_span.pipeline_stage,
            str(pass_span.pipeline_pass.micro_batch),
            ha="center",
            va="center",
            fontsize=7,
        )


def draw_timeline(prediction: RunPrediction, picture_path: Path) -> None:
    """Writes a PNG or SVG, by the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timeline = prediction.timeline()
    figure, axes = pyplot.subplots(figsize=(14, 1.2 + 0.5 * timeline.stage_count))
    color_maps = {True: pyplot.get_cmap(FORWARD_COLORS), False: pyplot.get_cmap(BACKWARD_COLORS)}
    for pass_span in timeline.pass_spans:
        color_shade = 0.35 + 0.4 * (pass_span.pipeline_pass.chunk_index + 1) / prediction.layout.vpp
        bar_color = color_maps[pass_span.pipeline_pass.forward](color_shade)
        _draw_pass(axes, pass_span, bar_color, with_number=len(timeline.pass_spans) <= MAX_NUMBERED_PASSES)

    axes.set_yticks(range(timeline.stage_count), [f"stage {i}" for i in range(timeline.stage_count)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds (blue: forward, orange: backward; darker: later chunk; number: micro-batch)")
    axes.set_title(
        f"{describe_layout(prediction.config, prediction.layout, prediction.data_parallel_size)}: "
        f"step {prediction.step_seconds:.2f} s, stages wait {prediction.bubble_share:.1%}"
    )
    figure.tight_layout()
    picture_bytes = io.BytesIO()
    figure.savefig(picture_bytes, format=picture_path.suffix[1:], dpi=120)
    pyplot.close(figure)
    picture_path.parent.mkdir(parents=True, exist_ok=True)
    durable_files.write_file(picture_path, picture_bytes.getvalue())
