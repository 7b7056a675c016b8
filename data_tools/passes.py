"""How many rows one pass over a data set takes, and so how many steps of a run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from megatron_vl.words import counted

from .estimates import Estimate, Stratum, mean
from .survey import Drawn, Survey

PASSES = (1, 2, 3)
"""Numbers of passes whose steps are shown."""


def rows_of_a_pass(found: Survey) -> Estimate:
    """Rows that hold as many samples as the data set has; of a mixture, drawn by the sources' shares.

    All tokens of the data set are divided by the tokens of a packed row. The number is taken as exact if the
    whole data set was read, although packing in another order may make a row more or less.
    """
    packed = any(len(row.samples) > 1 for row in found.rows)

    def size(sample: Drawn) -> float:
        return 0.0 if sample.refused else sample.tokens if packed else 1.0

    of_sample = mean(found.of_drawn(map(size, found.samples)))
    of_row = mean([Stratum(1.0, math.inf, np.array([row.total(size) for row in found.rows], np.float64))])
    there = found.population * len(found.samples) / (len(found.samples) + found.excluded)
    rows = there * of_sample.value / of_row.value
    if found.exact:
        return Estimate(rows, rows, rows)
    if of_sample.high is None or of_row.high is None:
        return Estimate(rows, None, None)

    errors = [(each.high or 0.0) / each.value - 1 for each in (of_sample, of_row)]
    error = rows * math.hypot(*errors)
    return Estimate(rows, rows - error, rows + error)


def steps_of(passes: int, rows: Estimate, global_batch_size: int) -> int:
    """Steps until the data were read ``passes`` times; the last one may go into the next pass."""
    return max(1, math.ceil(passes * rows.value / global_batch_size - 1e-9))


def pass_as_json(found: Survey, global_batch_size: int) -> dict[str, Any]:
    """Rows of a pass, and the steps of one and more of them."""
    rows = rows_of_a_pass(found)
    steps = {str(passes): steps_of(passes, rows, global_batch_size) for passes in PASSES}
    return {"rows": rows.as_json(), "global_batch_size": global_batch_size, "steps": steps}


def pass_in_words(facts: dict[str, Any]) -> str:
    """``one pass over the data is about 120 ± 4 rows, 15 steps at global_batch_size 8 (...)``.

    Args:
        facts: what :func:`pass_as_json` gives.
    """
    value, high = facts["rows"]["value"], facts["rows"]["high"]
    error = " ± ?" if high is None else f" ± {high - value:,.0f}" if high > value else ""
    once, twice, thrice = facts["steps"].values()
    return (
        f"one pass over the data is about {counted(f'{value:,.0f}{error}', 'row')},"
        f" {counted(f'{once:,}', 'step')} at global_batch_size {facts['global_batch_size']}"
        f" (2 passes: {twice:,}, 3: {thrice:,})"
    )
