"""Draws the timeline of a pipeline: a bar for each pass, a line for each stage."""

from __future__ import annotations

import io
from pathlib import Path

from megatron_vl import durable
from megatron_vl.planning.predict import Prediction
from megatron_vl.planning.search import describe

FORWARD, BACKWARD = "Blues", "Oranges"
"""Colour maps; chunks are shades of them."""
NUMBERED = 400
"""Up to so many passes, the bars bear the number of their micro-batch."""


def draw(prediction: Prediction, path: Path) -> None:
    """Writes a PNG or SVG, by the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timeline = prediction.timeline()
    vpp = prediction.layout.vpp
    figure, axes = pyplot.subplots(figsize=(14, 1.2 + 0.5 * timeline.stages))
    maps = {True: pyplot.get_cmap(FORWARD), False: pyplot.get_cmap(BACKWARD)}
    for span in timeline.spans:
        shade = 0.35 + 0.4 * (span.step.chunk + 1) / vpp
        axes.barh(
            span.stage,
            span.end - span.start,
            left=span.start,
            height=0.86,
            color=maps[span.step.forward](shade),
            edgecolor="white",
            linewidth=0.4,
        )
        if len(timeline.spans) <= NUMBERED:
            middle = (span.start + span.end) / 2
            axes.text(middle, span.stage, str(span.step.micro_batch), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(timeline.stages), [f"stage {i}" for i in range(timeline.stages)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds (blue: forward, orange: backward; darker: later chunk; number: micro-batch)")
    axes.set_title(
        f"{describe(prediction.config, prediction.layout, prediction.dp)}: step {prediction.step:.2f} s,"
        f" stages wait {prediction.bubble:.1%}"
    )
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=120)
    pyplot.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write(path, content.getvalue())
