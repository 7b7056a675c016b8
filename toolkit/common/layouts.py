"""Parses parallel layouts from the command line, such as ``tp2sp``, ``tp2pp2vpp2`` or ``pp2:layers=1-3``."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_vl.config import ParallelConfig
from megatron_vl.system.errors import UsageError

LAYOUT_GRAMMAR = (
    "tp2, sp (sequence parallel), cp2, pp2, vpp2, dp2, ep2, etp2 in any order, or 1 for a single rank; "
    "`:layers=1-3` gives the decoder layers of each of the pp x vpp chunks. "
    "Examples: 1, tp2sp, pp2:layers=1-3, tp2pp2vpp2, dp2"
)
# The longer names come first, because a pattern takes the first match.
_PART_PATTERN = re.compile(r"(vpp|etp|tp|cp|pp|dp|ep)([1-9]\d*)|(sp)")
_LAYOUT_PATTERN = re.compile(
    rf"(?P<sizes>1|(?:{_PART_PATTERN.pattern})+)(?::layers=(?P<layers>\d+(?:-\d+)*))?"
)


@dataclass(frozen=True)
class LayoutSpec(ParallelConfig):
    """A layout as it was written, before it is checked against a model."""

    layout_text: str = ""
    dp: int = 1

    @property
    def world_size(self) -> int:
        return self.replica_ranks * self.dp

    @property
    def row_multiple(self) -> int:
        """The number of rows of a step must be a multiple of this.

        Data-parallel ranks have equal numbers of rows, and interleaving needs a multiple of ``pp`` on each.
        """
        return self.dp * (self.pp if self.vpp > 1 else 1)

    @property
    def layout_arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tp", "pp", "vpp", "layers", "ep", "etp", "cp")}


def parse_layout(layout_text: str) -> LayoutSpec:
    """Parses a layout. Without ``dp``, it has as few data-parallel ranks as ``ep`` and ``etp`` allow.

    Raises:
        UsageError: the text does not follow the grammar, names a size twice, or has sp without tp.
    """
    if (match := _LAYOUT_PATTERN.fullmatch(layout_text.strip())) is None:
        raise UsageError(f"{layout_text!r} is not a layout; valid: {LAYOUT_GRAMMAR}")
    parts = _PART_PATTERN.findall(match["sizes"])
    names = [key or word for key, _, word in parts]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"layout {layout_text!r} names {repeated[0]} twice")
    sizes: dict[str, Any] = {key: int(number) for key, number, _ in parts if key}
    if "sp" in names and sizes.get("tp", 1) == 1:
        raise UsageError(f"layout {layout_text!r}: sp (sequence parallel) needs tp of at least 2")
    if "dp" not in sizes:
        # The fewest replicas whose ranks can be divided among the experts.
        stage_ranks = sizes.get("tp", 1) * sizes.get("cp", 1)
        expert_ranks = sizes.get("ep", 1) * sizes.get("etp", 1)
        sizes["dp"] = expert_ranks // math.gcd(stage_ranks, expert_ranks)
    layers = [int(count) for count in match["layers"].split("-")] if match["layers"] else None
    return LayoutSpec(layout_text=match[0], sequence_parallel="sp" in names, layers=layers, **sizes)


def layout_sizes_text(sizes: Mapping[str, Any]) -> str:
    """The sizes of a layout in one line; those of context and expert parallelism only where they are used."""
    shown = {name: sizes.get(name, 1) for name in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")}
    return " x ".join(f"{n} {size}" for n, size in shown.items() if size > 1 or n not in ("cp", "ep", "etp"))


def parse_layouts(layouts_text: str) -> list[LayoutSpec]:
    """Parses comma-separated layouts. Raises UsageError like :func:`parse_layout`, and for no layout."""
    if not (layouts := [parse_layout(part) for part in layouts_text.split(",") if part.strip()]):
        raise UsageError(f"no layout is given; valid: {LAYOUT_GRAMMAR}")
    return layouts
