"""The gates between an original checkpoint and its converted one, from the strictest to the weakest.

A score alone proves little: a checkpoint with one permuted projection can score as the original does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from converters.verify import compare

ORDER = ("tensors", "logits", "text", "scores")


@dataclass
class Gate:
    """One comparison. ``passed`` is None if it was not made, because an earlier gate failed or it
    was not requested."""

    name: str
    passed: bool | None
    measured: str
    details: list[str] = field(default_factory=list)


def tensors(original: Path, converted: Path) -> Gate:
    """Compares every tensor of both folders bit for bit."""
    result = compare(original, converted)
    if not result.differences:
        return Gate("tensors", True, f"{result.tensors} tensors, {result.bytes / 1e9:.3g} GB, identical")
    details = [f"{found.name}: {found.how}" for found in result.differences]
    return Gate("tensors", False, f"{len(details)} of {result.tensors} tensors differ", details)


def logits(
    original: list[dict[str, Any]], converted: list[dict[str, Any]], work: Path, other_work: Path
) -> Gate:
    """Compares inputs and logits of some prompts, made by each folder's own processor and model, bit for bit.

    Args:
        original, converted: lines of :mod:`adapter`; the first ones have logits.
        work, other_work: the folders in which the logits of the last tokens are.
    """
    first, other_first = ([line for line in lines if "logits" in line] for lines in (original, converted))
    if not first or len(first) != len(other_first):
        return Gate("logits", False, f"{len(first)} and {len(other_first)} prompts were run")
    details = []
    largest = 0.0
    for a, b in zip(first, other_first, strict=True):
        x, y = a["logits"]["inputs"], b["logits"]["inputs"]
        differing = sorted(name for name in x.keys() | y.keys() if x.get(name) != y.get(name))
        if differing:
            details.append(
                f"question {a['number'] + 1}: the processors give different {', '.join(differing)}"
            )
        elif a["logits"]["logits"] != b["logits"]["logits"]:
            file = f"logits_{a['number']}.safetensors"
            last, other = load_file(work / file)["last"], load_file(other_work / file)["last"]
            apart = float((last - other).abs().max())
            largest = max(largest, apart)
            details.append(
                f"question {a['number'] + 1}: logits differ, those of the last token by at most {apart:.3g}"
            )

    if details:
        measured = f"{len(details)} of {len(first)} prompts differ, by at most {largest:.3g}"
        return Gate("logits", False, measured, details)
    tokens = sum(a["logits"]["tokens"] for a in first)
    return Gate("logits", True, f"{len(first)} prompts, {tokens} tokens, inputs and logits identical")


def text(original: list[dict[str, Any]], converted: list[dict[str, Any]], questions: int) -> Gate:
    """Compares the generated answers and what was thought before them, word for word."""
    if not len(original) == len(converted) == questions:
        return Gate("text", False, f"{len(original)} and {len(converted)} answers to {questions} questions")
    details = []
    for a, b in zip(original, converted, strict=True):
        differing = [part for part in ("answer", "thinking") if a[part] != b[part]]
        if differing:
            x, y = ((line[differing[0]] or "")[:200] for line in (a, b))
            details.append(f"{a['index']}: {x!r} against {y!r}")
    if details:
        return Gate("text", False, f"{len(details)} of {questions} answers differ", details)
    return Gate("text", True, f"{questions} answers identical")


def scores(metrics: dict[str, dict[str, float]], problems: dict[str, str]) -> Gate:
    """Compares the benchmark's metrics. Every checkpoint must have some, and the converted one's must
    equal the original's.

    Args:
        metrics: role -> metric -> value; the trained checkpoint may have any values.
        problems: role -> what went wrong with it.
    """
    missing = [
        f"{role}: no metric; {problems.get(role, 'VLMEvalKit gives no reason')}"
        for role in metrics
        if not metrics[role]
    ]
    if missing:
        return Gate("scores", False, f"{len(missing)} of {len(metrics)} checkpoints have no score", missing)

    a, b = metrics["original"], metrics["converted"]
    differing = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    details = [f"{name}: {a.get(name)} against {b.get(name)}" for name in differing]
    if "trained" in metrics and metrics["trained"].keys() != a.keys():
        ours = sorted(metrics["trained"])
        theirs = sorted(a)
        details.append(f"the trained checkpoint has metrics {ours}, the original {theirs}")

    if details:
        return Gate("scores", False, f"{len(details)} of {len(a)} metrics differ", details)

    return Gate("scores", True, "all metrics equal: " + ", ".join(a))
