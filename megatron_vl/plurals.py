"""Numbers with their nouns, for messages."""

from __future__ import annotations


def pluralize(shown_count: int | str, singular_noun: str) -> str:
    """``1 file`` or ``3 files``; ``1 micro-batch`` or ``2 micro-batches``.

    A word in place of the number, such as ``unknown``, takes the plural.
    """
    plural_ending = "es" if singular_noun.endswith("ch") else "s"
    return f"{shown_count} {singular_noun}{'' if str(shown_count) == '1' else plural_ending}"
