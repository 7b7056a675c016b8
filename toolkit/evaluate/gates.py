"""The gates between an original checkpoint and its converted one, from the strictest to the weakest.

A score alone proves little: a checkpoint with one permuted projection can score as the original does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from converters.verify import compare

ORDER = ("tensors", "logits", "text", "scores")


@dataclass
class Gate:
    """One comparison. ``passed`` is None when it was not made: an earlier gate had failed, or it was not
    asked for."""

    name: str
    passed: bool | None
    measured: str
    details: list[str] = field(default_factory=list)


def tensors(original: Path, converted: Path) -> Gate:
    """Every tensor of both folders, bit for bit."""
    result = compare(original, converted)
    if not result.differences:
        return Gate("tensors", True, f"{result.tensors} tensors, {result.bytes / 1e9:.3g} GB, identical")
    details = [f"{found.name}: {found.how}" for found in result.differences]
    return Gate("tensors", False, f"{len(details)} of {result.tensors} tensors differ", details)


def logits(original: Path, converted: Path) -> Gate:
    """Inputs and logits of some prompts, made by each folder's own processor and model; equal to the last
    bit.

    Args:
        original, converted: work folders of :mod:`worker`.
    """
    a, b = (json.loads((work / "logits.json").read_text()) for work in (original, converted))
    last_a, last_b = (load_file(work / "logits.safetensors") for work in (original, converted))
    details, largest, tokens = [], 0.0, sum(one["tokens"] for one in a)
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        x, y = one["inputs"], other["inputs"]
        differing = sorted(name for name in x.keys() | y.keys() if x.get(name) != y.get(name))
        if differing:
            details.append(f"question {i + 1}: the processors give other {', '.join(differing)}")
        elif one["logits"] != other["logits"]:
            apart = float((last_a[str(i)] - last_b[str(i)]).abs().max())
            largest = max(largest, apart)
            details.append(f"question {i + 1}: logits differ, those of the last token by {apart:.3g} at most")
    if not a:
        return Gate("logits", False, "no prompt was run")
    if not details:
        return Gate("logits", True, f"{len(a)} prompts, {tokens} tokens, inputs and logits identical")
    return Gate(
        "logits", False, f"{len(details)} of {len(a)} prompts differ, by {largest:.3g} at most", details
    )


def text(original: list[dict[str, Any]], converted: list[dict[str, Any]], questions: int) -> Gate:
    """The generated answers, word for word; of a dialogue, those of all turns."""
    if not len(original) == len(converted) == questions:
        return Gate("text", False, f"{len(original)} and {len(converted)} answers to {questions} questions")
    pairs = [(a, b) for a, b in zip(original, converted, strict=True) if a["answer"] != b["answer"]]
    details = [f"{a['index']}: {_short(a['answer'])!r} against {_short(b['answer'])!r}" for a, b in pairs]
    if details:
        return Gate("text", False, f"{len(details)} of {questions} answers differ", details)
    return Gate("text", True, f"{questions} answers identical")


def _short(answer: str | list[str]) -> str | list[str]:
    """An answer's beginning; of a dialogue, that of each turn."""
    return answer[:200] if isinstance(answer, str) else [turn[:200] for turn in answer]


def scores(metrics: dict[str, dict[str, float]], problems: dict[str, str]) -> Gate:
    """The benchmark's metrics: of every checkpoint there must be some, and the converted one's are the
    original's.

    Args:
        metrics: role -> metric -> value; the trained checkpoint's values may be any.
        problems: role -> what went wrong with it.
    """
    missing = [
        f"{role}: no metric; {problems.get(role, 'VLMEvalKit gives no reason')}"
        for role in metrics
        if not metrics[role]
    ]
    if missing:
        return Gate("scores", False, f"no score of {len(missing)} of {len(metrics)} checkpoints", missing)
    a, b = metrics["original"], metrics["converted"]
    differing = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    details = [f"{name}: {a.get(name)} against {b.get(name)}" for name in differing]
    if "trained" in metrics and metrics["trained"].keys() != a.keys():
        details.append(f"trained has metrics {sorted(metrics['trained'])}, original {sorted(a)}")
    if details:
        return Gate("scores", False, f"{len(details)} of {len(a)} metrics differ", details)
    return Gate("scores", True, "all metrics equal: " + ", ".join(a))
