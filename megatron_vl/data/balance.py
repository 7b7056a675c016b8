"""Assigns the rows of a step to data-parallel ranks so that no rank waits for one with more pictures.

Rows have the same number of tokens but different numbers of patches. Ranks wait for each other at every
gradient reduction, so a step takes as long as the rank with the most work. Every rank keeps as many rows as
it was dealt. Rows are swapped between the ranks with the most and the least work as long as this lowers the
larger of the two loads.
"""

from __future__ import annotations

from dataclasses import dataclass

CANDIDATES = 8
"""Number of ranks with the least work to try as partners.
Trying hundreds takes half a second and gains nothing."""


@dataclass(frozen=True)
class RowOrigin:
    """A row of the step, given by the rank that read it and its number there."""

    rank: int
    row: int


def balance(costs: list[list[float]], tolerance: float = 0.01) -> list[list[RowOrigin]]:
    """Assigns all rows to ranks. The result depends only on the costs, so it is equal on all ranks.

    Args:
        costs: for each rank, the cost of each of its rows. All ranks have the same number of rows.
        tolerance: stop when the largest load exceeds the mean by no more than this share.

    Returns:
        For each rank, the rows that it works on. A row that stays keeps its number.
    """
    places = [[RowOrigin(rank, row) for row in range(len(own))] for rank, own in enumerate(costs)]
    loads = [sum(own) for own in costs]
    mean = sum(loads) / len(loads)
    for _ in range(sum(len(own) for own in costs)):
        heavy = max(range(len(loads)), key=lambda r: (loads[r], -r))
        swap = None
        if loads[heavy] > mean * (1 + tolerance):
            swap = _best_swap(costs, places, loads, heavy)
        if swap is None:
            return places
        light, given, taken, moved = swap
        places[heavy][given], places[light][taken] = places[light][taken], places[heavy][given]
        loads[heavy] -= moved
        loads[light] += moved
    return places


def _best_swap(
    costs: list[list[float]], places: list[list[RowOrigin]], loads: list[float], heavy: int
) -> tuple[int, int, int, float] | None:
    """The swap that lowers the larger load of a pair most; None if no swap lowers it.

    It is (other rank, row of the heavy rank, row of the other rank, cost moved).
    """

    def cost(place: RowOrigin) -> float:
        return costs[place.rank][place.row]

    best: tuple[float, tuple[int, int, int, float]] | None = None
    for light in sorted(range(len(loads)), key=lambda r: (loads[r], r))[:CANDIDATES]:
        if light == heavy:
            continue
        if best is not None and loads[light] >= best[0]:
            break  # a rank with a larger load cannot do better
        for given, ours in enumerate(places[heavy]):
            for taken, theirs in enumerate(places[light]):
                moved = cost(ours) - cost(theirs)
                if moved <= 0:
                    continue
                larger = max(loads[heavy] - moved, loads[light] + moved)
                if larger < loads[heavy] and (best is None or larger < best[0]):
                    best = larger, (light, given, taken, moved)
    return None if best is None else best[1]
