"""Parses parallel layouts from the command line, such as ``tp2sp``, ``tp2pp2vpp2`` or ``pp2:layers=1-3``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_vl.config import ParallelConfig
from megatron_vl.system.errors import UserError


class LayoutTextError(UserError, ValueError):
    """The text is not a layout."""


LAYOUT_GRAMMAR = (
    "tp2, sp (sequence parallel), cp2, pp2, vpp2, dp2, ep2, etp2 in any order, or 1 for a single rank; "
    "`:layers=1-3` gives the decoder layers of each of the pp x vpp chunks. "
    "Examples: 1, tp2sp, pp2:layers=1-3, tp2pp2vpp2, dp2"
)
SIZE_KEYS = ("vpp", "etp", "tp", "cp", "pp", "dp", "ep")
"""Keys with a number. The longer ones come first, because a pattern takes the first match."""
_PART_PATTERN = re.compile(rf"({'|'.join(SIZE_KEYS)})([1-9]\d*)|(sp)")
_LAYOUT_PATTERN = re.compile(rf"(1|(?:{_PART_PATTERN.pattern})+)(?::layers=(\d+(?:-\d+)*))?")


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
        """Arguments of :func:`megatron_vl.spec.layout.make_layout`."""
        return {name: getattr(self, name) for name in ("tp", "pp", "vpp", "layers", "ep", "etp", "cp")}


def parse_layout(layout_text: str) -> LayoutSpec:
    """Parses a layout. Without ``dp``, it has as few data-parallel ranks as ``ep`` and ``etp`` allow.

    Raises:
        LayoutTextError: the text does not follow the grammar, names a size twice, or has sp without tp.
    """
    layout_match = _LAYOUT_PATTERN.fullmatch(layout_text.strip())
    if layout_match is None:
        raise LayoutTextError(f"{layout_text!r} is not a layout; valid: {LAYOUT_GRAMMAR}")

    layout_parts = [(key or word, number) for key, number, word in _PART_PATTERN.findall(layout_match[1])]
    part_names = [name for name, _ in layout_parts]
    for name in part_names:
        if part_names.count(name) > 1:
            raise LayoutTextError(f"layout {layout_text!r} names {name} twice")

    parallel_sizes: dict[str, Any] = {name: int(number) for name, number in layout_parts if number}

    tensor_parallel_size = parallel_sizes.get("tp", 1)
    stage_ranks = tensor_parallel_size * parallel_sizes.get("cp", 1)
    expert_ranks = parallel_sizes.get("ep", 1) * parallel_sizes.get("etp", 1)
    if "dp" not in parallel_sizes:
        # The fewest replicas whose ranks can be divided among the experts.
        parallel_sizes["dp"] = expert_ranks // math.gcd(stage_ranks, expert_ranks)
    if "sp" in part_names and tensor_parallel_size == 1:
        raise LayoutTextError(f"layout {layout_text!r}: sp (sequence parallel) needs tp of at least 2")

    layers_per_chunk = None
    if ":layers=" in layout_text:
        layers_per_chunk = list(map(int, layout_match[layout_match.lastindex or 0].split("-")))
    return LayoutSpec(
        layout_text=layout_text.strip(),
        sequence_parallel="sp" in part_names,
        layers=layers_per_chunk,
        **parallel_sizes,
    )


def layout_sizes_text(layout_sizes: Mapping[str, Any]) -> str:
    """The sizes of a layout in one line; context and expert parallelism only where they are used.

    Args:
        layout_sizes: tp, pp, vpp, dp, ep, etp and, if they are more than 1, cp and key_ranks.
    """
    context_text = f" x cp {layout_sizes['cp']}" if layout_sizes.get("cp", 1) > 1 else ""
    if "key_ranks" in layout_sizes:
        context_text += f" ({layout_sizes['key_ranks']} ranks gather keys)"
    layout_text = (
        f"tp {layout_sizes['tp']}{context_text} x pp {layout_sizes['pp']} x "
        f"vpp {layout_sizes['vpp']} x dp {layout_sizes['dp']}"
    )
    if layout_sizes["ep"] * layout_sizes["etp"] > 1:
        layout_text += f", experts ep {layout_sizes['ep']} x etp {layout_sizes['etp']}"
    return layout_text


def parse_layouts(layouts_text: str) -> list[LayoutSpec]:
    """Parses comma-separated layouts. Raises LayoutTextError like :func:`parse_layout`, and for no layout."""
    layouts = [parse_layout(part) for part in layouts_text.split(",") if part.strip()]
    if not layouts:
        raise LayoutTextError(f"no layout is given; valid: {LAYOUT_GRAMMAR}")
    return layouts
