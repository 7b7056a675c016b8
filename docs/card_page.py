"""Shows a card of ``benchmarks.card`` as a section of Markdown, with its losses as SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.common.html_templates import template_environment

PLOT_LEFT = 60
PLOT_WIDTH = 600
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
    """A plot of curves over the steps. Lengths are in pixels."""

    title: str
    top: int
    height: int
    tick_labels: dict[float, str]
    """Values, from the lowest to the highest of the panel, and what is written at them."""
    curves: dict[str, list[float]]

    def vertical_position(self, plotted_value: float) -> float:
        lowest = min(self.tick_labels)
        highest = max(self.tick_labels)
        value_range = (highest - lowest) or 1.0
        share_from_top = (highest - plotted_value) / value_range
        return round(self.top + self.height * share_from_top, 1)

    def line_points(self, curve_name: str) -> str:
        """The ``points`` of a polyline."""
        plotted_values = self.curves[curve_name]
        step_width = PLOT_WIDTH / max(1, len(plotted_values) - 1)
        point_texts = []
        for step_index, plotted_value in enumerate(plotted_values):
            x = round(PLOT_LEFT + step_index * step_width, 1)
            y = self.vertical_position(plotted_value)
            point_texts.append(f"{x},{y}")
        return " ".join(point_texts)


def card_section(model_card: dict[str, Any]) -> str:
    """The Markdown of a card, with the heading of a section."""
    return _render("card.md.jinja", model_card["curve"], **model_card)


def _render(template_name: str, curve_figures: dict[str, Any], **model_card: Any) -> str:
    environment = template_environment(Path(__file__).parent / "templates")
    template = environment.get_template(template_name)
    loss_curves = curve_figures["losses"]
    return template.render(
        **model_card,
        panels=[_loss_panel(loss_curves), _gap_panel(loss_curves)],
        line_styles=LINE_STYLES,
        step_count=len(loss_curves["transformers"]),
    )


def _loss_panel(loss_curves: dict[str, list[float]]) -> Panel:
    lowest = min(map(min, loss_curves.values()))
    highest = max(map(max, loss_curves.values()))
    middle = (lowest + highest) / 2

    tick_labels = {}
    for tick_value in (lowest, middle, highest):
        tick_labels[tick_value] = f"{tick_value:.2f}"
    return Panel(
        title="loss per token (nats)",
        top=44,
        height=240,
        tick_labels=tick_labels,
        curves=loss_curves,
    )


def _gap_panel(loss_curves: dict[str, list[float]]) -> Panel:
    """The gaps to ``transformers``, by their decimal logarithms."""
    reference_losses = loss_curves["transformers"]
    gap_curves: dict[str, list[float]] = {}
    for curve_name, losses in loss_curves.items():
        if curve_name == "transformers":
            continue
        exponents = []
        for loss, reference_loss in zip(losses, reference_losses, strict=True):
            gap = abs(loss - reference_loss)
            exponents.append(math.log10(max(SMALLEST_GAP, gap)))
        gap_curves[curve_name] = exponents

    lowest = min(map(min, gap_curves.values()))
    highest = max(map(max, gap_curves.values()))
    tick_labels: dict[float, str] = {}
    for exponent in range(math.floor(lowest), math.ceil(highest) + 1):
        tick_labels[exponent] = f"1e{exponent}"
    return Panel(
        title="gap to transformers",
        top=324,
        height=150,
        tick_labels=tick_labels,
        curves=gap_curves,
    )
