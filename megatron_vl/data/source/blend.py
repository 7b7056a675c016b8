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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_vl.system.errors import UserError

NAME_FIELD = "source"
"""The entry of ``subflavors`` that names a source."""
WEIGHTED_KINDS = ("blend", "datasets")
"""Kinds of mixtures whose parts have weights."""
EPOCHIZED_KIND = "blend_epochized"
"""The kind of mixture whose parts have repetitions."""
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
    full_sample_count: int = 0
    """Number of samples without regard to the subset."""
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
    message_prefix = f"{description_path}: " if description_path else ""
    blend_parts = list(_find_parts(dataset_identity, _BlendPart(prefix=message_prefix), ""))
    amount_kinds = {part.kind for part in blend_parts if part.kind}
    if len(amount_kinds) > 1:
        raise BlendError(
            f"{message_prefix}weights (blend) and repetitions (blend_epochized) cannot be mixed: use one of"
            " the two for all parts, nested mixtures included"
        )

    has_repetitions = "repetitions" in amount_kinds
    draw_amounts = [part.amount * (part.samples if has_repetitions else 1) for part in blend_parts]
    total_amount = math.fsum(draw_amounts)
    if len(blend_parts) > 1 and not total_amount:
        raise BlendError(
            f"{message_prefix}nothing is drawn from any part of the blend: give a part a weight above 0"
        )
    sample_shares = [amount / total_amount if total_amount else 1.0 for amount in draw_amounts]

    named_parts = []
    for part in blend_parts:
        has_name = part.path or part.called
        named_parts.append(part if has_name else replace(part, called=(dataset_name,)))
    source_names = _unique_names(named_parts)
    source_keys = _source_keys([part.content for part in blend_parts])
    return tuple(
        BlendSource(
            source_names[i],
            source_keys[i],
            part.samples,
            part.given,
            sample_shares[i],
            part.length,
            part.first,
            part.content.get("content") or "",
            math.ceil(round(draw_amounts[i], 6)) if has_repetitions else 0,
        )
        for i, part in enumerate(blend_parts)
    )


def list_names(given_names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    unnamed_count = len(given_names) - MAX_NAMED_SOURCES
    names_text = ", ".join(given_names[:MAX_NAMED_SOURCES])
    return f"{names_text} and {unnamed_count} more" if unnamed_count > 0 else names_text


def summarize_blend(blend_sources: tuple[BlendSource, ...]) -> list[str]:
    """Lines for the start of a run: each source with its weight or epochs, samples and share.

    The smallest ones of a large blend share a line.
    """
    if len(blend_sources) < 2:
        return []
    order_by_share = sorted(range(len(blend_sources)), key=lambda i: (-blend_sources[i].sample_share, i))
    shown_sources = sorted(order_by_share[:MAX_LISTED_SOURCES])
    summary_lines = [f"source {blend_sources[i].summary_line()}" for i in shown_sources]
    smaller_sources = [blend_sources[i] for i in order_by_share[MAX_LISTED_SOURCES:]]

    if smaller_sources:
        sample_count = sum(source.sample_count for source in smaller_sources)
        sample_share = sum(source.sample_share for source in smaller_sources)
        summary_lines.append(
            f"{len(smaller_sources)} smaller sources: {sample_count:,} samples,"
            f" {sample_share:.1%} of the samples expected"
        )

    return [
        *summary_lines,
        "the line of a step shows the mean loss of each source and, in brackets, its samples and learnt"
        " tokens so far",
    ]


@dataclass(frozen=True)
class _BlendPart:
    """A part of a mixture, with what the mixtures around it say about it."""

    prefix: str
    path: str = ""
    called: tuple[str, ...] = ()
    amount: float = 1.0
    """Share of the weight, or number of repetitions."""
    given: str = ""
    kind: str = ""
    subsets: tuple[Any, ...] = ()
    """The ranges of the subsets, the innermost first."""
    content: dict[str, Any] = field(default_factory=dict)
    length: int = 0
    first: int = 0
    samples: int = 0


def _find_parts(identity_value: Any, blend_part: _BlendPart, base_folder: str) -> Iterator[_BlendPart]:
    """The data sets of an identity.

    Args:
        blend_part: collects what the mixtures around the identity say.
        base_folder: where the names in the identity start, relative to the outermost description.
    """
    if "content" in identity_value:
        yield _dataset_part(identity_value, blend_part)
        return
    if "mixture" in identity_value:
        yield from _find_parts(identity_value["mixture"], blend_part, base_folder)
        return

    if identity_value.get("subset"):
        blend_part = replace(blend_part, subsets=(identity_value["subset"]["range"], *blend_part.subsets))
    if "data" in identity_value:
        dataset_path = posixpath.normpath(posixpath.join(base_folder, str(identity_value.get("name", ""))))
        own_names = (identity_value["called"],) if "called" in identity_value else ()
        inner_identity = identity_value["data"]
        is_mixture = "mixture" in inner_identity
        blend_part = replace(
            blend_part, path="" if is_mixture else dataset_path, called=(*blend_part.called, *own_names)
        )
        yield from _find_parts(
            inner_identity, blend_part, posixpath.dirname(dataset_path) if is_mixture else base_folder
        )
        return

    for blend_kind in (*WEIGHTED_KINDS, EPOCHIZED_KIND):
        if blend_kind in identity_value:
            yield from _weighted_parts(identity_value[blend_kind], blend_kind, blend_part, base_folder)
            return
    raise BlendError(f"{blend_part.prefix}a mixture of the kind {sorted(identity_value)} cannot be read")


def _weighted_parts(
    inner_parts: list[Any], blend_kind: str, outer_part: _BlendPart, base_folder: str
) -> Iterator[_BlendPart]:
    amount_field, forbidden_field = (
        ("weight", "repetitions") if blend_kind in WEIGHTED_KINDS else ("repetitions", "weight")
    )
    part_amounts = []
    for part_identity in inner_parts:
        part_name = part_identity.get("name", "a part")
        if forbidden_field in part_identity:
            raise BlendError(
                f"{outer_part.prefix}{part_name} of the {blend_kind} has {forbidden_field}; give its"
                f" {amount_field}: weights and repetitions cannot be mixed"
            )
        part_amount = part_identity.get(amount_field, 1)
        if type(part_amount) not in (int, float) or not 0 <= part_amount < math.inf:
            raise BlendError(
                f"{outer_part.prefix}the {amount_field} of {part_name} is {part_amount!r}; give 0 or more"
            )
        part_amounts.append(part_amount)

    total_amount = math.fsum(part_amounts) if blend_kind in WEIGHTED_KINDS else 1.0
    outer_text = f" in a mixture of {outer_part.given}" if outer_part.given else ""
    for part_identity, part_amount in zip(inner_parts, part_amounts, strict=True):
        weight_text = f"weight {part_amount:g}" if blend_kind in WEIGHTED_KINDS else f"{part_amount:g} epochs"
        draw_amount = outer_part.amount * (part_amount / total_amount if total_amount else 0.0)
        inner_part = replace(
            outer_part, amount=draw_amount, given=weight_text + outer_text, kind=amount_field
        )
        yield from _find_parts(part_identity, inner_part, base_folder)


def _dataset_part(content_identity: dict[str, Any], blend_part: _BlendPart) -> _BlendPart:
    length = content_identity.get("samples") or 0
    first_sample, end_sample = _subset_bounds(length, blend_part.subsets)
    content_facts = {
        name: content_identity.get(name) for name in ("content", "split", "samples", "shards", "list")
    }
    if blend_part.subsets:
        content_facts["subset"] = [first_sample, end_sample]
    return replace(
        blend_part,
        content=content_facts,
        length=length,
        first=first_sample,
        samples=end_sample - first_sample,
    )


def _subset_bounds(sample_count: int, subset_ranges: tuple[Any, ...]) -> tuple[int, int]:
    """The samples that are left of a data set, as Energon counts them: the first, and the one after the last.

    Args:
        subset_ranges: ranges as descriptions give them, the innermost first. Only that one may count samples.
    """
    first_sample, end_sample, start_share, end_share = 0, sample_count, 0.0, 1.0
    for subset_range in subset_ranges:
        range_start, range_end = subset_range
        if type(range_start) is int:
            first_sample, end_sample = range_start, sample_count if isinstance(range_end, str) else range_end
            continue
        start_fraction = float(str(range_start).strip().removesuffix("%")) / 100
        end_fraction = float(str(range_end).strip().removesuffix("%")) / 100
        share_width = end_share - start_share
        end_share = start_share + end_fraction * share_width
        start_share += start_fraction * share_width
    range_size = end_sample - first_sample
    return first_sample + int(range_size * start_share), first_sample + int(range_size * end_share)


def _unique_names(blend_parts: list[_BlendPart]) -> list[str]:
    """Unique names: the given ones, or the ends of the paths, as long as needed to tell them apart."""
    path_pieces = []
    for part in blend_parts:
        path_pieces.append([piece for piece in part.path.split("/") if piece not in ("", ".", "..")])
    name_depths = [1] * len(blend_parts)

    def part_name(i: int) -> str:
        given_name = "/".join(" ".join(str(name).split()) for name in blend_parts[i].called)
        return given_name or "/".join(path_pieces[i][-name_depths[i] :]) or "data"

    while True:
        part_names = [part_name(i) for i in range(len(blend_parts))]
        name_counts = Counter(part_names)
        has_ambiguous_names = False
        for i, part in enumerate(blend_parts):
            if name_counts[part_names[i]] > 1 and not part.called and name_depths[i] < len(path_pieces[i]):
                name_depths[i] += 1
                has_ambiguous_names = True
        if not has_ambiguous_names:
            return _number_duplicates(part_names)


def _number_duplicates(plain_names: list[str]) -> list[str]:
    """Appends a number to the second and later ones of equal names."""
    used_names: set[str] = set()
    unique_names = []
    for name in plain_names:
        number, unique_name = 1, name
        while unique_name in used_names or (number > 1 and unique_name in plain_names):
            number += 1
            unique_name = f"{name}-{number}"
        used_names.add(unique_name)
        unique_names.append(unique_name)
    return unique_names


def _source_keys(content_facts: list[dict[str, Any]]) -> list[str]:
    """The keys of sources. A source that a blend names again gets a number in its key."""
    key_counts: Counter[str] = Counter()
    source_keys = []
    for content_fields in content_facts:
        key = hashlib.sha256(json.dumps(content_fields, sort_keys=True).encode()).hexdigest()[:16]
        key_counts[key] += 1
        source_keys.append(key if key_counts[key] == 1 else f"{key}-{key_counts[key]}")
    return source_keys
