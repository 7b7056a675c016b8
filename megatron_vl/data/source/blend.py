"""The sources of a blend: their names, how often they are drawn, and what they are known by.

A source is one data set that a metadataset names, itself or through other metadatasets. Everything here
follows from the identity of a data set (:class:`megatron_vl.data.source.description.SplitFacts`), so that the
sources of a checkpoint can be compared with those of a run.
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

from megatron_vl.errors import UserError

SOURCE = "megatron_vl/source"
"""Field of a sample's subflavors: the number of its source in the blend."""
GIVEN_NAME = "source"
"""The entry of ``subflavors`` that names a source."""
WEIGHTED = ("blend", "datasets")
"""Kinds of mixtures whose parts have weights."""
EPOCHIZED = "blend_epochized"
"""The kind of mixture whose parts have repetitions."""
LISTED = 40
"""Largest number of sources that the start of a run lists one by one."""
MOST_NAMED = 10
"""Largest number of sources that a message names."""


class BlendError(UserError, ValueError):
    """A blend that cannot be read. The message says what to change."""


@dataclass(frozen=True)
class Source:
    """One data set of a blend."""

    name: str
    """Unique within the blend. For people only."""
    key: str
    """What a resumed run knows the source by. It is made of content, split and subset, so that neither
    another name nor another folder changes it."""
    samples: int
    """Number of samples, of the subset if the blend takes only a part."""
    given: str
    """Weight or epochs as the blend gives them; empty for a data set that is not blended."""
    share: float
    """Expected share of the samples, 0 to 1. 0: nothing is drawn from the source."""
    length: int = 0
    """Number of samples without regard to the subset."""
    first: int = 0
    """Number of samples before the subset."""
    content: str = ""
    """Id of the data set's content; empty if it was prepared without one."""
    a_pass: int = 0
    """Samples that are drawn from it in one pass of a blend by repetitions; 0: the blend has weights."""

    def described(self) -> str:
        share = f"{self.share:.1%} of the samples expected" if self.share else "nothing is drawn from it"
        return f"{self.name}: {self.given}, {self.samples:,} samples, {share}"


def sources_of(identity: Any, name: str = "data", where: str = "") -> tuple[Source, ...]:
    """The sources of a data set or mixture, in Energon's order.

    Args:
        identity: identity of the data set as JSON values.
        name: what a data set is called that is not part of a mixture.
        where: path of the description, for messages.

    Raises:
        BlendError: weights are negative or all 0, or a mixture has weights and repetitions.
    """
    prefix = f"{where}: " if where else ""
    parts = list(_parts(identity, _Part(prefix=prefix), ""))
    kinds = {part.kind for part in parts if part.kind}
    if len(kinds) > 1:
        raise BlendError(
            f"{prefix}weights (blend) and repetitions (blend_epochized) cannot be mixed: use one of the two"
            " for all parts, nested mixtures included"
        )
    amounts = [part.amount * (part.samples if "repetitions" in kinds else 1) for part in parts]
    total = math.fsum(amounts)
    if len(parts) > 1 and not total:
        raise BlendError(f"{prefix}nothing is drawn from any part of the blend: give a part a weight above 0")
    shares = [amount / total if total else 1.0 for amount in amounts]

    names = _names([part if part.path or part.called else replace(part, called=(name,)) for part in parts])
    keys = _keys([part.content for part in parts])
    return tuple(
        Source(
            names[i],
            keys[i],
            part.samples,
            part.given,
            shares[i],
            part.length,
            part.first,
            part.content.get("content") or "",
            math.ceil(round(amounts[i], 6)) if "repetitions" in kinds else 0,
        )
        for i, part in enumerate(parts)
    )


def named(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def summary(sources: tuple[Source, ...]) -> list[str]:
    """Lines for the start of a run: each source with its weight or epochs, samples and share.

    The smallest ones of a large blend share a line.
    """
    if len(sources) < 2:
        return []
    order = sorted(range(len(sources)), key=lambda i: (-sources[i].share, i))
    shown = sorted(order[:LISTED])
    lines = [f"source {sources[i].described()}" for i in shown]
    rest = [sources[i] for i in order[LISTED:]]

    if rest:
        lines.append(
            f"{len(rest)} smaller sources: {sum(source.samples for source in rest):,} samples,"
            f" {sum(source.share for source in rest):.1%} of the samples expected"
        )

    return [
        *lines,
        "the line of a step shows the mean loss of each source and, in brackets, its samples and learnt"
        " tokens so far",
    ]


@dataclass(frozen=True)
class _Part:
    """A part of a mixture on the way down to its data sets."""

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


def _parts(value: Any, part: _Part, folder: str) -> Iterator[_Part]:
    """The data sets of an identity.

    Args:
        part: what is known from the mixtures around it.
        folder: where the names in the identity start, relative to the outermost description.
    """
    if "content" in value:
        yield _leaf(value, part)
        return
    if "mixture" in value:
        yield from _parts(value["mixture"], part, folder)
        return

    if value.get("subset"):
        part = replace(part, subsets=(value["subset"]["range"], *part.subsets))
    if "data" in value:
        path = posixpath.normpath(posixpath.join(folder, str(value.get("name", ""))))
        named = (value["called"],) if "called" in value else ()
        inner = value["data"]
        mixture = "mixture" in inner
        part = replace(part, path="" if mixture else path, called=(*part.called, *named))
        yield from _parts(inner, part, posixpath.dirname(path) if mixture else folder)
        return

    kind = next((kind for kind in (*WEIGHTED, EPOCHIZED) if kind in value), "")
    if not kind:
        raise BlendError(f"{part.prefix}a mixture of the kind {sorted(value)} cannot be read")
    yield from _blended(value[kind], kind, part, folder)


def _blended(inner: list[Any], kind: str, part: _Part, folder: str) -> Iterator[_Part]:
    field_, other = ("weight", "repetitions") if kind in WEIGHTED else ("repetitions", "weight")
    numbers = []
    for one in inner:
        if other in one:
            raise BlendError(
                f"{part.prefix}{one.get('name', 'a part')} of the {kind} has {other}; give its {field_}:"
                " weights and repetitions cannot be mixed"
            )
        number = one.get(field_, 1)
        if type(number) not in (int, float) or not 0 <= number < math.inf:
            raise BlendError(
                f"{part.prefix}the {field_} of {one.get('name', 'a part')} is {number!r}; give 0 or more"
            )
        numbers.append(number)

    total = math.fsum(numbers) if kind in WEIGHTED else 1.0
    around = f" in a mixture of {part.given}" if part.given else ""
    for one, number in zip(inner, numbers, strict=True):
        given = f"weight {number:g}" if kind in WEIGHTED else f"{number:g} epochs"
        amount = part.amount * (number / total if total else 0.0)
        below = replace(part, amount=amount, given=given + around, kind=field_)
        yield from _parts(one, below, folder)


def _leaf(content: dict[str, Any], part: _Part) -> _Part:
    length = content.get("samples") or 0
    first, last = _taken(length, part.subsets)
    known = {name: content.get(name) for name in ("content", "split", "samples", "shards", "list")}
    if part.subsets:
        known["subset"] = [first, last]
    return replace(part, content=known, length=length, first=first, samples=last - first)


def _taken(samples: int, subsets: tuple[Any, ...]) -> tuple[int, int]:
    """The samples that are left of a data set, as Energon counts them: the first, and the one after the last.

    Args:
        subsets: ranges as descriptions give them, the innermost first. Only that one may count samples.
    """
    first, last, start, end = 0, samples, 0.0, 1.0
    for one in subsets:
        low, high = one
        if type(low) is int:
            first, last = low, samples if isinstance(high, str) else high
            continue
        below, above = (float(str(limit).strip().removesuffix("%")) / 100 for limit in (low, high))
        start, end = start + below * (end - start), start + above * (end - start)
    size = last - first
    return first + int(size * start), first + int(size * end)


def _names(parts: list[_Part]) -> list[str]:
    """Unique names: the given ones, else the ends of the paths, as much of them as tells them apart."""
    pieces = [[piece for piece in part.path.split("/") if piece not in ("", ".", "..")] for part in parts]
    depths = [1] * len(parts)

    def name(i: int) -> str:
        given = "/".join(" ".join(str(one).split()) for one in parts[i].called)
        return given or "/".join(pieces[i][-depths[i] :]) or "data"

    while True:
        counts = Counter(map(name, range(len(parts))))
        longer = [
            i
            for i, part in enumerate(parts)
            if counts[name(i)] > 1 and not part.called and depths[i] < len(pieces[i])
        ]
        if not longer:
            return _numbered([name(i) for i in range(len(parts))])
        for i in longer:
            depths[i] += 1


def _numbered(names: list[str]) -> list[str]:
    """The second and later ones of equal names get a number."""
    used: set[str] = set()
    found = []
    for name in names:
        number, unique = 1, name
        while unique in used or (number > 1 and unique in names):
            number += 1
            unique = f"{name}-{number}"
        used.add(unique)
        found.append(unique)
    return found


def _keys(contents: list[dict[str, Any]]) -> list[str]:
    """What sources are known by. A source that a blend names twice is known by its turn too."""
    seen: Counter[str] = Counter()
    found = []
    for content in contents:
        text = json.dumps(content, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        seen[key] += 1
        found.append(key if seen[key] == 1 else f"{key}-{seen[key]}")
    return found
