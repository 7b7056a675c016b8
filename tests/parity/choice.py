"""Chooses the cases that ``make test`` runs: cheap ones that together have every setting, a training in every
way to divide a step's work, each family in the ways that meet its own code, and YaRN with TP, PP, CP and EP.
``make test-full`` runs the whole table."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WAYS = ("tp", "pp", "vpp", "cp", "ep", "etp", "overlap", "decoupled", "distributed_optimizer")
"""Fields that say how a step's work is divided or overlapped."""
FAMILY_WAYS = {
    "qwen2_5_vl": {"tp", "pp", "cp"},
    "qwen3_vl": {"tp", "pp", "cp"},
    "qwen3_vl_moe": {"pp"},
    "qwen3_5": {"pp", "cp"},
    "qwen3_5_moe": {"tp", "cp"},
}
"""The ways that meet code which no other family's case with that way runs."""
TEXT_ONLY = {"text", "short_text", "without_loss"}
"""Samples without images and videos."""


def choose(cases: Sequence[Mapping[str, Any]], costs: Mapping[str, float] | None = None) -> list[str]:
    """Returns the names of the chosen cases, in the order of the table.

    Args:
        cases: each with a ``name``; its other fields are its settings.
        costs: the cost of each case by name, in any unit; equal if left out.
    """
    costs = costs or dict.fromkeys((case["name"] for case in cases), 1.0)
    held = {case["name"]: set(demands(case)) for case in cases}
    uncovered = set().union(*held.values()) if held else set()

    chosen: list[str] = []
    while uncovered:
        # Take the case that covers most for its cost. Of several, take the first: the choice is reproducible.
        name = max(held, key=lambda name: len(held[name] & uncovered) / costs[name])
        uncovered -= held[name]
        chosen.append(name)

    # Later choices can make an earlier one redundant.
    for name in sorted(chosen, key=lambda name: -costs[name]):
        others = set().union(*(held[other] for other in chosen if other != name))
        if held[name] <= others:
            chosen.remove(name)

    return [case["name"] for case in cases if case["name"] in chosen]


def demands(case: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yields what a case holds: its settings, ways to divide the work of a training, and ranks of a family.

    If ranks share rows, or every rank holds the tower, only what that setting is part of counts.
    Otherwise such a case would replace one with whole rows, or with the tower on the first stage.
    """
    needed = next((name for name in ("cp", "decoupled") if case.get(name)), None)
    ways = [name for name in WAYS if name in case and (case[name] is True or case[name] != 1)]
    if needed is None:
        yield from settings(case)
    else:
        yield needed, repr(case[needed])
    for way in ways if case.get("train") else ():
        if needed in (None, way):
            yield "train", way
    if case.get("train") and any(all(set(row) <= TEXT_ONLY for row in step) for step in case["steps"]):
        yield "train", "the tower skipped by every rank"  # no gradient comes for its buckets
    if needed == "cp" and any("without_loss" in row for step in case["steps"] for row in step):
        yield "cp", "rows without loss"
    for ranks in FAMILY_WAYS.get(case.get("family", ""), set()) & {*ways}:
        if needed in (None, ranks):
            yield case["family"], ranks
    for ranks in {"tp", "pp", "cp", "ep"} & {*ways} if case.get("yarn") else ():
        yield "yarn", ranks


def settings(case: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The settings of a case.

    Rows differ by the kinds of samples in them, layer splits by their irregularities.
    """
    found = {
        (field, repr(value)) for field, value in case.items() if field not in ("name", "steps", "layers")
    }
    kinds = {kind for step in case["steps"] for row in step for kind in row}
    found |= {("sample", kind) for kind in kinds}

    rows = [row for step in case["steps"] for row in step]
    if kinds - TEXT_ONLY and any(set(row) <= TEXT_ONLY for row in rows):
        found.add(("rows", "with and without images"))
    if any(len(row) > 1 for row in rows):
        found.add(("rows", "packed"))
    if len(case["steps"]) > 1:
        found.add(("steps", "several"))

    layers = case.get("layers") or []
    if len(set(layers)) > 1:
        found.add(("layers", "uneven"))
    if 0 in layers:
        found.add(("layers", "an empty stage or chunk"))
    return found
