"""Shows a card of ``benchmarks.card`` as a section of Markdown, with its losses as SVG."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.common.html_templates import template_environment

LINE_STYLES = {
    # Wide and pale below, so that the thin lines on top of it hide nothing.
    "transformers": 'stroke="#ef8a17" stroke-width="5" stroke-opacity="0.45"',
    "transformers, eager": 'stroke="#3a9d5d" stroke-width="1.2"',
    "megatron-vl": 'stroke="#3f51b5" stroke-width="1.2"',
}
"""How the line of each training is drawn, in the order of drawing."""
SMALLEST_GAP = 1e-8
"""Smaller gaps are drawn here."""


@dataclass(frozen=True)
class Panel:
    """A plot of curves over the steps, 600 pixels wide from x = 60. Lengths are in pixels."""

    title: str
    top: int
    height: int
    tick_labels: dict[float, str]
    """Values, from the lowest to the highest of the panel, and what is written at them."""
    curves: dict[str, list[float]]

    def vertical_position(self, value: float) -> float:
        lowest, highest = min(self.tick_labels), max(self.tick_labels)
        return round(self.top + self.height * (highest - value) / ((highest - lowest) or 1.0), 1)

    def line_points(self, name: str) -> str:
        """The ``points`` of a polyline."""
        values = self.curves[name]
        width = 600 / max(1, len(values) - 1)
        return " ".join(
            f"{round(60 + step * width, 1)},{self.vertical_position(value)}"
            for step, value in enumerate(values)
        )


def card_section(card: dict[str, Any]) -> str:
    """The Markdown of a card, with the heading of a section."""
    template = template_environment(Path(__file__).parent / "templates").get_template("card.md.jinja")
    losses = card["curve"]["losses"]
    return template.render(
        **card,
        panels=[_loss_panel(losses), _gap_panel(losses)],
        line_styles=LINE_STYLES,
        step_count=len(losses["transformers"]),
    )


def _loss_panel(losses: dict[str, list[float]]) -> Panel:
    lowest = min(map(min, losses.values()))
    highest = max(map(max, losses.values()))
    ticks = {value: f"{value:.2f}" for value in (lowest, (lowest + highest) / 2, highest)}
    return Panel("loss per token (nats)", top=44, height=240, tick_labels=ticks, curves=losses)


def _gap_panel(losses: dict[str, list[float]]) -> Panel:
    """The gaps to ``transformers``, by their decimal logarithms."""
    reference = losses["transformers"]
    gaps = {
        name: [math.log10(max(SMALLEST_GAP, abs(a - b))) for a, b in zip(curve, reference, strict=True)]
        for name, curve in losses.items()
        if name != "transformers"
    }
    lowest = math.floor(min(map(min, gaps.values())))
    highest = math.ceil(max(map(max, gaps.values())))
    ticks = {float(exponent): f"1e{exponent}" for exponent in range(lowest, highest + 1)}
    return Panel("gap to transformers", top=324, height=150, tick_labels=ticks, curves=gaps)
