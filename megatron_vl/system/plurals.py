"""Numbers with their nouns, for messages."""


def pluralize(shown_count: int | str, singular_noun: str) -> str:
    """``1 file`` or ``3 files``; ``1 micro-batch`` or ``2 micro-batches``.

    A word in place of the number, such as ``unknown``, takes the plural.
    """
    plural_ending = "es" if singular_noun.endswith(("ch", "ss")) else "s"
    return f"{shown_count} {singular_noun}{'' if str(shown_count) == '1' else plural_ending}"


def count_text(parameter_count: float) -> str:
    """A number of parameters: ``1.71 M``, ``8.29 B``."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameter_count >= 0.9995 * size:
            return f"{parameter_count / size:.3g} {unit}"
    return f"{parameter_count:.0f}"


def trained_text(parameter_count: int, trained_count: int) -> str:
    """Says how many parameters are trained; empty if all are."""
    if trained_count == parameter_count:
        return ""
    counts = f"{trained_count:,} of {parameter_count:,} parameters"
    return f"trained: {counts} ({trained_count / parameter_count:.2%})"
