"""The sources of a blend: their names, their keys, and how often samples are drawn from them.

A source is one data set that a metadataset names. Everything here follows from the identity of a data set
(:class:`megatron_vl.data.source.dataset_description.SplitFacts`), so that the sources of a checkpoint can be
compared with those of a run.
"""

import hashlib
import json
import math
import posixpath
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vl.data.source.location import LoaderError

NAME_FIELD = "source"
"""The entry of ``subflavors`` that names a source."""
AMOUNT_BY_KIND = {"blend": "weight", "blend_epochized": "repetitions"}
"""What a part of a mixture of each kind has."""


@dataclass(frozen=True)
class BlendSource:
    """One data set of a blend."""

    source_name: str
    """Unique within the blend. Only messages use it."""
    source_key: str
    """Identifies the source in a resumed run. It is made of content and split, so that neither another name
    nor another folder changes it."""
    sample_count: int
    weight_text: str
    """Weight or epochs as the blend gives them; empty for a data set that is not blended."""
    sample_share: float
    """Expected share of the samples, 0 to 1. 0: nothing is drawn from the source."""
    content_id: str = ""
    """Id of the data set's content; empty if it was prepared without one."""
    draws_per_pass: int = 0
    """Number of draws from it in one pass of a blend by repetitions; 0: the blend has weights."""

    def summary_line(self) -> str:
        share = (
            f"{self.sample_share:.1%} of the samples expected"
            if self.sample_share
            else "nothing is drawn from it"
        )
        return f"{self.source_name}: {self.weight_text}, {self.sample_count:,} samples, {share}"


def summarize_blend(sources: Sequence[BlendSource]) -> list[str]:
    """Lines for the start of a run: each source with its weight or epochs, samples and share."""
    if len(sources) < 2:
        return []
    return [
        *(f"source {source.summary_line()}" for source in sources),
        "the line of a step shows the mean loss of each source and, in brackets, its samples, loss tokens and"
        " passes so far",
    ]


# --- The sources of an identity -----------------------------------------------------------------------------


def read_blend_sources(
    dataset_identity: Any, dataset_name: str = "data", description_path: str = ""
) -> tuple[BlendSource, ...]:
    """The sources of a data set or mixture, in Energon's order.

    Args:
        dataset_identity: identity of the data set as JSON values.
        dataset_name: the name of a data set that is not part of a mixture.
        description_path: path of the description, for messages.

    Raises:
        LoaderError: weights are negative or all 0, or a mixture has weights and repetitions.
    """
    prefix = f"{description_path}: " if description_path else ""
    mixture = dataset_identity.get("mixture", {"data": dataset_identity})
    kind = next((kind for kind in AMOUNT_BY_KIND if kind in mixture), "")
    parts = mixture[kind] if kind else [mixture]
    field = AMOUNT_BY_KIND.get(kind, "")
    given_amounts = [_given_amount(part, kind, field, prefix) for part in parts] if kind else [1.0]
    counts = [part["data"].get("samples") or 0 for part in parts]
    amounts = given_amounts
    if field == "weight":
        total_weight = math.fsum(given_amounts)
        amounts = [weight / total_weight if total_weight else 0.0 for weight in given_amounts]
    elif field:
        amounts = [repetitions * count for repetitions, count in zip(given_amounts, counts, strict=True)]
    total = math.fsum(amounts)
    if len(parts) > 1 and not total:
        raise LoaderError(
            f"{prefix}nothing is drawn from any part of the blend: give a part a weight above 0"
        )

    texts = {"weight": "weight {:g}", "repetitions": "{:g} epochs", "": ""}
    names, keys = _unique_names(parts, dataset_name), _source_keys([part["data"] for part in parts])
    return tuple(
        BlendSource(
            names[i],
            keys[i],
            counts[i],
            texts[field].format(given_amounts[i]),
            amounts[i] / total if total else 1.0,
            part["data"]["content"],
            math.ceil(round(amounts[i], 6)) if field == "repetitions" else 0,
        )
        for i, part in enumerate(parts)
    )


def _given_amount(part: dict[str, Any], kind: str, field: str, prefix: str) -> float:
    name = part.get("name", "a part")
    other_field = "repetitions" if field == "weight" else "weight"
    if other_field in part:
        raise LoaderError(
            f"{prefix}{name} of the {kind} has {other_field}; give its {field}: weights and repetitions"
            " cannot be mixed"
        )
    amount: float = part.get(field, 1)
    if type(amount) not in (int, float) or not 0 <= amount < math.inf:
        raise LoaderError(f"{prefix}the {field} of {name} is {amount!r}; give 0 or more")
    return amount


def _unique_names(parts: list[dict[str, Any]], dataset_name: str) -> list[str]:
    """Unique names: the given ones, or the ends of the paths, as long as needed to tell them apart."""
    paths = [posixpath.normpath(str(part.get("name", ""))) for part in parts]
    pieces = [[piece for piece in path.split("/") if piece not in ("", ".", "..")] for path in paths]
    given_names = [" ".join(str(part.get("called", "")).split()) for part in parts]
    depths = [1] * len(parts)
    while True:
        names = [
            given or "/".join(path_pieces[-depth:]) or dataset_name
            for given, path_pieces, depth in zip(given_names, pieces, depths, strict=True)
        ]
        name_counts = Counter(names)
        ambiguous = [
            i
            for i, given in enumerate(given_names)
            if name_counts[names[i]] > 1 and not given and depths[i] < len(pieces[i])
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


def _source_keys(contents: list[dict[str, Any]]) -> list[str]:
    """The keys of sources. A source that a blend names again gets a number in its key."""
    key_counts: Counter[str] = Counter()
    source_keys = []
    for content in contents:
        facts = {name: content.get(name) for name in ("content", "split", "samples", "shards", "list")}
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
        if (old_source := old_by_key.pop(source.source_key, None)) is None:
            change = "is back and continues" if source.source_key in drawn_keys else "is new"
            lines.append(f"{source.source_name} {change}: {_amount_text(source)}")
        elif (
            not math.isclose(source.sample_share, old_source.sample_share, rel_tol=1e-9)
            or source.draws_per_pass != old_source.draws_per_pass
        ):
            lines.append(
                f"{source.source_name} continues: {_amount_text(old_source)} becomes {_amount_text(source)}"
            )
    lines += [
        f"{one.source_name} is left out; its position and counts are kept" for one in old_by_key.values()
    ]

    if not lines and [one.source_key for one in old_sources] != [one.source_key for one in new_sources]:
        return ["the data sets are in another order"]
    return lines


def _amount_text(source: BlendSource) -> str:
    return f"{source.weight_text or 'the only data set'} ({source.sample_share:.1%})"


def read_saved_sources(saved_identity: Any) -> tuple[BlendSource, ...]:
    """The sources of a saved identity; none if it cannot be read."""
    try:
        return read_blend_sources(saved_identity, "the former data set")
    except (LoaderError, KeyError, TypeError, ValueError, AttributeError):
        return ()
