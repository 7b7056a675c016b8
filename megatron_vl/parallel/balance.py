"""Which data-parallel rank gets which rows of a step, so that no rank waits for one with more pictures.

Rows have equally many tokens and different numbers of patches. Ranks meet at every gradient reduction, so a
step lasts as long as the rank with the most work. Every rank keeps as many rows as it read; rows are swapped
between the ranks with the most and the least work while that lowers the larger of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

CANDIDATES = 8
"""Ranks with the least work that are tried as partners: trying all of hundreds takes half a second and gains
nothing."""


@dataclass(frozen=True)
class RowOrigin:
    """A row of the step: the rank that read it and its number there."""

    rank: int
    row: int


def balance(costs: list[list[float]], tolerance: float = 0.01) -> list[list[RowOrigin]]:
    """An assignment of all rows, the same on every rank that calls with the same costs.

    Args:
        costs: of each rank, the cost of each of its rows; equally many rows everywhere.
        tolerance: ends when the largest rank is within this share of the mean.

    Returns:
        Of each rank, the rows that it works on; a row that stays keeps its number.
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
    """(other rank, row of the heavy rank, row of the other, cost moved) that lowers the pair's larger load
    most."""

    def cost(place: RowOrigin) -> float:
        return costs[place.rank][place.row]

    best: tuple[float, tuple[int, int, int, float]] | None = None
    for light in sorted(range(len(loads)), key=lambda r: (loads[r], r))[:CANDIDATES]:
        if light == heavy:
            continue
        if best is not None and loads[light] >= best[0]:
            break  # whoever has more cannot end below what was found
        for given, ours in enumerate(places[heavy]):
            for taken, theirs in enumerate(places[light]):
                moved = cost(ours) - cost(theirs)
                if moved <= 0:
                    continue
                larger = max(loads[heavy] - moved, loads[light] + moved)
                if larger < loads[heavy] and (best is None or larger < best[0]):
                    best = larger, (light, given, taken, moved)
    return None if best is None else best[1]
