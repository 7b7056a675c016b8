"""The sources of a blend: their names, their keys, and how often samples are drawn from them.

A source is one data set that a metadataset names, itself or through other metadatasets. Everything here
follows from the identity of a data set (:class:`megatron_vl.data.source.dataset_description.SplitFacts`), so
that the sources of a checkpoint can be compared with those of a run.
"""

from __future__ import annotations

import hashlib
import json
import math
import posixpath
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_vl.system.errors import UserError

NAME_FIELD = "source"
"""The entry of ``subflavors`` that names a source."""
AMOUNT_BY_KIND = {"blend": "weight", "datasets": "weight", "blend_epochized": "repetitions"}
"""What a part of a mixture of each kind has."""
MAX_LISTED_SOURCES = 40
"""Largest number of sources that the start of a run lists one by one."""
MAX_NAMED_SOURCES = 10
"""Largest number of sources that a message names."""


class BlendError(UserError, ValueError):
    """A blend that cannot be read. The message says what to change."""


@dataclass(frozen=True)
class BlendSource:
    """One data set of a blend."""

    source_name: str
    """Unique within the blend. Only messages use it."""
    source_key: str
    """Identifies the source in a resumed run. It is made of content, split and subset, so that neither
    another name nor another folder changes it."""
    sample_count: int
    """Number of samples; if the blend takes a subset, of the subset."""
    weight_text: str
    """Weight or epochs as the blend gives them; empty for a data set that is not blended."""
    sample_share: float
    """Expected share of the samples, 0 to 1. 0: nothing is drawn from the source."""
    first_sample: int = 0
    """Number of samples before the subset."""
    content_id: str = ""
    """Id of the data set's content; empty if it was prepared without one."""
    draws_per_pass: int = 0
    """Number of draws from it in one pass of a blend by repetitions; 0: the blend has weights."""

    def summary_line(self) -> str:
        share_text = "nothing is drawn from it"
        if self.sample_share:
            share_text = f"{self.sample_share:.1%} of the samples expected"
        return f"{self.source_name}: {self.weight_text}, {self.sample_count:,} samples, {share_text}"


def list_names(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    unnamed_count = len(names) - MAX_NAMED_SOURCES
    text = ", ".join(names[:MAX_NAMED_SOURCES])
    return f"{text} and {unnamed_count} more" if unnamed_count > 0 else text


def summarize_blend(sources: Sequence[BlendSource]) -> list[str]:
    """Lines for the start of a run: each source with its weight or epochs, samples and share.

    The smallest ones of a large blend share a line.
    """
    if len(sources) < 2:
        return []
    by_share = sorted(range(len(sources)), key=lambda i: (-sources[i].sample_share, i))
    lines = [f"source {sources[i].summary_line()}" for i in sorted(by_share[:MAX_LISTED_SOURCES])]
    if smaller_sources := [sources[i] for i in by_share[MAX_LISTED_SOURCES:]]:
        sample_count = sum(source.sample_count for source in smaller_sources)
        share = sum(source.sample_share for source in smaller_sources)
        lines.append(
            f"{len(smaller_sources)} smaller sources: {sample_count:,} samples, {share:.1%} of the samples"
            " expected"
        )
    return [
        *lines,
        "the line of a step shows the mean loss of each source and, in brackets, its samples, loss tokens and"
        " passes so far",
    ]


# --- The sources of an identity -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _BlendPart:
    """A part of a mixture, with what the mixtures around it say about it."""

    prefix: str
    """Begins the messages."""
    path: str = ""
    called: tuple[str, ...] = ()
    amount: float = 1.0
    """Share of the weight, or number of repetitions."""
    given: str = ""
    kind: str = ""
    subsets: tuple[Any, ...] = ()
    """The ranges of the subsets, the innermost first."""


def read_blend_sources(
    dataset_identity: Any, dataset_name: str = "data", description_path: str = ""
) -> tuple[BlendSource, ...]:
    """The sources of a data set or mixture, in Energon's order.

    Args:
        dataset_identity: identity of the data set as JSON values.
        dataset_name: the name of a data set that is not part of a mixture.
        description_path: path of the description, for messages.

    Raises:
        BlendError: weights are negative or all 0, or a mixture has weights and repetitions.
    """
    prefix = f"{description_path}: " if description_path else ""
    found = list(_find_parts(dataset_identity, _BlendPart(prefix), ""))
    kinds = {part.kind for part, _ in found if part.kind}
    if len(kinds) > 1:
        raise BlendError(
            f"{prefix}weights (blend) and repetitions (blend_epochized) cannot be mixed: use one of the two"
            " for all parts, nested mixtures included"
        )

    bounds = [_subset_bounds(content.get("samples") or 0, part.subsets) for part, content in found]
    counts = [end - first for first, end in bounds]
    has_repetitions = "repetitions" in kinds
    amounts = [
        part.amount * (count if has_repetitions else 1)
        for (part, _), count in zip(found, counts, strict=True)
    ]
    total = math.fsum(amounts)
    if len(found) > 1 and not total:
        raise BlendError(f"{prefix}nothing is drawn from any part of the blend: give a part a weight above 0")

    names = _unique_names([part for part, _ in found], dataset_name)
    keys = _source_keys(found, bounds)
    return tuple(
        BlendSource(
            names[i],
            keys[i],
            counts[i],
            part.given,
            amounts[i] / total if total else 1.0,
            bounds[i][0],
            content.get("content") or "",
            math.ceil(round(amounts[i], 6)) if has_repetitions else 0,
        )
        for i, (part, content) in enumerate(found)
    )


def _find_parts(identity: Any, part: _BlendPart, folder: str) -> Iterator[tuple[_BlendPart, dict[str, Any]]]:
    """The data sets of an identity, each with its own identity.

    Args:
        part: collects what the mixtures around the identity say.
        folder: where the names in the identity start, relative to the outermost description.
    """
    if "content" in identity:
        yield part, identity
        return
    if "mixture" in identity:
        yield from _find_parts(identity["mixture"], part, folder)
        return

    if identity.get("subset"):
        part = replace(part, subsets=(identity["subset"]["range"], *part.subsets))
    if "data" in identity:
        path = posixpath.normpath(posixpath.join(folder, str(identity.get("name", ""))))
        inner = identity["data"]
        if "called" in identity:
            part = replace(part, called=(*part.called, identity["called"]))
        if "mixture" in inner:
            yield from _find_parts(inner, replace(part, path=""), posixpath.dirname(path))
        else:
            yield from _find_parts(inner, replace(part, path=path), folder)
        return

    for kind in AMOUNT_BY_KIND:
        if kind in identity:
            for inner, inner_part in _weighted_parts(identity[kind], kind, part):
                yield from _find_parts(inner, inner_part, folder)
            return
    raise BlendError(f"{part.prefix}a mixture of the kind {sorted(identity)} cannot be read")


def _weighted_parts(inner_parts: list[Any], kind: str, outer: _BlendPart) -> Iterator[tuple[Any, _BlendPart]]:
    field = AMOUNT_BY_KIND[kind]
    other_field = "repetitions" if field == "weight" else "weight"
    for inner in inner_parts:
        name = inner.get("name", "a part")
        if other_field in inner:
            raise BlendError(
                f"{outer.prefix}{name} of the {kind} has {other_field}; give its {field}: weights and"
                " repetitions cannot be mixed"
            )
        amount = inner.get(field, 1)
        if type(amount) not in (int, float) or not 0 <= amount < math.inf:
            raise BlendError(f"{outer.prefix}the {field} of {name} is {amount!r}; give 0 or more")

    amounts = [inner.get(field, 1) for inner in inner_parts]
    total = math.fsum(amounts) if field == "weight" else 1.0
    outer_text = f" in a mixture of {outer.given}" if outer.given else ""
    for inner, amount in zip(inner_parts, amounts, strict=True):
        given = f"weight {amount:g}" if field == "weight" else f"{amount:g} epochs"
        draw_amount = outer.amount * (amount / total if total else 0.0)
        yield inner, replace(outer, amount=draw_amount, given=given + outer_text, kind=field)


def _subset_bounds(sample_count: int, subset_ranges: tuple[Any, ...]) -> tuple[int, int]:
    """The samples that are left of a data set, as Energon counts them: the first, and the one after the last.

    Args:
        subset_ranges: ranges as descriptions give them, the innermost first. Only that one may count samples.
    """
    first, end, start_share, end_share = 0, sample_count, 0.0, 1.0
    for range_start, range_end in subset_ranges:
        if type(range_start) is int:
            first, end = range_start, sample_count if isinstance(range_end, str) else range_end
            continue
        start_fraction = float(str(range_start).strip().removesuffix("%")) / 100
        end_fraction = float(str(range_end).strip().removesuffix("%")) / 100
        width = end_share - start_share
        end_share = start_share + end_fraction * width
        start_share += start_fraction * width
    return first + int((end - first) * start_share), first + int((end - first) * end_share)


def _unique_names(parts: list[_BlendPart], dataset_name: str) -> list[str]:
    """Unique names: the given ones, or the ends of the paths, as long as needed to tell them apart."""
    pieces = [[piece for piece in part.path.split("/") if piece not in ("", ".", "..")] for part in parts]
    depths = [1] * len(parts)
    while True:
        names = []
        for part, path_pieces, depth in zip(parts, pieces, depths, strict=True):
            given_name = "/".join(" ".join(str(name).split()) for name in part.called)
            default_name = "data" if part.path else dataset_name
            names.append(given_name or "/".join(path_pieces[-depth:]) or default_name)
        name_counts = Counter(names)
        ambiguous = [
            i
            for i, part in enumerate(parts)
            if name_counts[names[i]] > 1 and not part.called and depths[i] < len(pieces[i])
        ]
        if not ambiguous:
            return _number_duplicates(names)
        for i in ambiguous:
            depths[i] += 1


def _number_duplicates(plain_names: list[str]) -> list[str]:
    """Appends a number to the second and later ones of equal names."""
    unique_names: dict[str, None] = {}
    for name in plain_names:
        number, unique_name = 1, name
        while unique_name in unique_names or (number > 1 and unique_name in plain_names):
            number += 1
            unique_name = f"{name}-{number}"
        unique_names[unique_name] = None
    return list(unique_names)


def _source_keys(found: list[tuple[_BlendPart, dict[str, Any]]], bounds: list[tuple[int, int]]) -> list[str]:
    """The keys of sources. A source that a blend names again gets a number in its key."""
    key_counts: Counter[str] = Counter()
    source_keys = []
    for (part, content), subset in zip(found, bounds, strict=True):
        facts = {name: content.get(name) for name in ("content", "split", "samples", "shards", "list")}
        if part.subsets:
            facts["subset"] = list(subset)
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        key_counts[key] += 1
        source_keys.append(key if key_counts[key] == 1 else f"{key}-{key_counts[key]}")
    return source_keys


# --- Changes of a resumed run -------------------------------------------------------------------------------


def blend_change_lines(
    old_sources: Sequence[BlendSource], new_sources: Sequence[BlendSource], drawn_keys: Collection[str] = ()
) -> list[str]:
    """One line for each source that changes.

    There are none if the same samples are drawn, as often and in the same order. Weights count by ratio.

    Args:
        drawn_keys: the keys of all sources from which the run has ever drawn.
    """
    old_by_key = {source.source_key: source for source in old_sources}
    lines = []
    for source in new_sources:
        old_source = old_by_key.pop(source.source_key, None)
        if old_source is None:
            change = "is back and continues" if source.source_key in drawn_keys else "is new"
            lines.append(f"{source.source_name} {change}: {_amount_text(source)}")
        elif (
            not math.isclose(source.sample_share, old_source.sample_share, rel_tol=1e-9)
            or source.draws_per_pass != old_source.draws_per_pass
        ):
            amounts = f"{_amount_text(old_source)} becomes {_amount_text(source)}"
            lines.append(f"{source.source_name} continues: {amounts}")
    for source in old_by_key.values():
        lines.append(f"{source.source_name} is left out; its position and counts are kept")

    has_same_order = [one.source_key for one in old_sources] == [one.source_key for one in new_sources]
    if not lines and not has_same_order:
        return ["the data sets are in another order"]
    if (unlisted_count := len(lines) - MAX_LISTED_SOURCES) > 0:
        lines = [*lines[:MAX_LISTED_SOURCES], f"{unlisted_count} more sources change"]
    return lines


def _amount_text(source: BlendSource) -> str:
    return f"{source.weight_text or 'the only data set'} ({source.sample_share:.1%})"


def read_saved_sources(saved_identity: Any) -> tuple[BlendSource, ...]:
    """The sources of a saved identity; none if it cannot be read."""
    try:
        return read_blend_sources(saved_identity, "the former data set")
    except (BlendError, KeyError, TypeError, ValueError, AttributeError):
        return ()
