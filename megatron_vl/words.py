"""Numbers with their nouns, for messages."""

from __future__ import annotations


def counted(number: int | str, noun: str) -> str:
    """``1 file`` or ``3 files``; ``1 micro-batch`` or ``2 micro-batches``.

    Args:
        number: as it is to be shown; ``unknown`` takes the plural.
        noun: in the singular.
    """
    if str(number) == "1":
        return f"{number} {noun}"
    return f"{number} {noun}es" if noun.endswith("ch") else f"{number} {noun}s"
