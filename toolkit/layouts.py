"""Parses parallel layouts from the command line, such as ``tp2sp``, ``tp2pp2vpp2`` or ``pp2:layers=1-3``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megatron_vl.errors import UserError


class LayoutTextError(UserError, ValueError):
    """The text is not a layout."""


GRAMMAR = (
    "tp2, sp (sequence parallel), cp2, pp2, vpp2, dp2, ep2, etp2 in any order, or 1 for a single rank; "
    "`:layers=1-3` gives the decoder layers of each of the pp x vpp chunks. "
    "Examples: 1, tp2sp, pp2:layers=1-3, tp2pp2vpp2, dp2"
)
SIZES = ("vpp", "etp", "tp", "cp", "pp", "dp", "ep")
"""Keys with a number. The longer ones come first, because a pattern takes the first match."""
_PART = re.compile(rf"({'|'.join(SIZES)})([1-9]\d*)|(sp)")
_TEXT = re.compile(rf"(1|(?:{_PART.pattern})+)(?::layers=(\d+(?:-\d+)*))?")


@dataclass(frozen=True)
class LayoutSpec:
    """A layout as it was written, before it is checked against a model."""

    text: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    layers: tuple[int, ...] | None = None

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def rows(self) -> int:
        """The number of rows of a step must be a multiple of this.

        Data-parallel ranks have equal numbers of rows, and interleaving needs a multiple of ``pp`` on each.
        """
        return self.dp * (self.pp if self.vpp > 1 else 1)

    @property
    def model_parallel(self) -> dict[str, Any]:
        """Arguments of :func:`megatron_vl.spec.layout.make_layout`."""
        layers = list(self.layers) if self.layers is not None else None
        return {
            "tp": self.tp,
            "pp": self.pp,
            "vpp": self.vpp,
            "layers": layers,
            "ep": self.ep,
            "etp": self.etp,
            "cp": self.cp,
        }


def parse_layout(text: str) -> LayoutSpec:
    """Parses a layout. Without ``dp``, it has as few data-parallel ranks as ``ep`` and ``etp`` allow.

    Raises:
        LayoutTextError: the text does not follow the grammar, names a size twice, or has sp without tp.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise LayoutTextError(f"{text!r} is not a layout; valid: {GRAMMAR}")

    parts = [(key or word, number) for key, number, word in _PART.findall(match[1])]
    names = [name for name, _ in parts]
    if len(set(names)) < len(names):
        raise LayoutTextError(f"layout {text!r} names {next(n for n in names if names.count(n) > 1)} twice")

    sizes = {name: int(number) for name, number in parts if number}
    tp = sizes.get("tp", 1)
    stage_ranks = tp * sizes.get("cp", 1)
    experts = sizes.get("ep", 1) * sizes.get("etp", 1)
    if "dp" not in sizes:
        sizes["dp"] = next(dp for dp in range(1, experts + 1) if stage_ranks * dp % experts == 0)
    if "sp" in names and tp == 1:
        raise LayoutTextError(f"layout {text!r}: sp (sequence parallel) needs tp of at least 2")

    layers = (
        tuple(int(part) for part in match[match.lastindex or 0].split("-")) if ":layers=" in text else None
    )
    return LayoutSpec(text.strip(), **sizes, sequence_parallel="sp" in names, layers=layers)


def parse_layouts(text: str) -> list[LayoutSpec]:
    """Parses comma-separated layouts. Raises LayoutTextError like :func:`parse_layout`, and for no layout."""
    layouts = [parse_layout(part) for part in text.split(",") if part.strip()]
    if not layouts:
        raise LayoutTextError(f"no layout is given; valid: {GRAMMAR}")
    return layouts
