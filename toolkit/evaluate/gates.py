"""The gates between an original checkpoint and its converted one, from the strictest to the weakest.

A score alone proves little: a checkpoint with one permuted projection can score as the original does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from converters.compare import compare_weights

GATE_ORDER = ("tensors", "logits", "text", "scores")


@dataclass
class ConversionGate:
    """The result of one comparison."""

    name: str
    passed: bool | None
    """None: it was not made, because an earlier gate failed or it was not requested."""
    measured: str
    details: list[str] = field(default_factory=list)


def compare_tensors(original_dir: Path, converted_dir: Path) -> ConversionGate:
    """Compares every tensor of both folders bit for bit."""
    tensor_comparison = compare_weights(original_dir, converted_dir)
    if not tensor_comparison.differences:
        return ConversionGate(
            "tensors",
            True,
            f"{tensor_comparison.tensors} tensors, {tensor_comparison.bytes / 1e9:.3g} GB, identical",
        )
    details = [f"{difference.name}: {difference.how}" for difference in tensor_comparison.differences]
    return ConversionGate(
        "tensors", False, f"{len(details)} of {tensor_comparison.tensors} tensors differ", details
    )


def compare_logits(
    original: list[dict[str, Any]], converted: list[dict[str, Any]], original_work: Path, converted_work: Path
) -> ConversionGate:
    """Compares inputs and logits of some prompts, made by each folder's own processor and model, bit for bit.

    Args:
        original, converted: lines of :mod:`vlmevalkit_adapter`. Only the first ones have logits.
        original_work, converted_work: the folders in which the logits of the last tokens are.
    """
    original_lines = [line for line in original if "logits" in line]
    converted_lines = [line for line in converted if "logits" in line]
    if not original_lines or len(original_lines) != len(converted_lines):
        return ConversionGate(
            "logits", False, f"{len(original_lines)} and {len(converted_lines)} prompts were run"
        )

    details = []
    largest_difference = 0.0
    for original_line, converted_line in zip(original_lines, converted_lines, strict=True):
        # Other inputs give other logits, so inputs are compared first.
        differing = _differing_keys(original_line["logits"]["inputs"], converted_line["logits"]["inputs"])
        if differing:
            details.append(
                f"question {original_line['number'] + 1}: the "
                f"processors give different {', '.join(differing)}"
            )
        elif original_line["logits"]["logits"] != converted_line["logits"]["logits"]:
            logits_file = f"logits_{original_line['number']}.safetensors"
            max_difference = _largest_difference(original_work / logits_file, converted_work / logits_file)
            largest_difference = max(largest_difference, max_difference)
            details.append(
                f"question {original_line['number'] + 1}: logits differ, "
                f"those of the last token by at most {max_difference:.3g}"
            )

    if details:
        measured_text = (
            f"{len(details)} of {len(original_lines)} prompts differ, by at most {largest_difference:.3g}"
        )
        return ConversionGate("logits", False, measured_text, details)
    num_tokens = sum(original_line["logits"]["tokens"] for original_line in original_lines)
    return ConversionGate(
        "logits", True, f"{len(original_lines)} prompts, {num_tokens} tokens, inputs and logits identical"
    )


def _largest_difference(original_file: Path, converted_file: Path) -> float:
    """The largest absolute difference between the logits in two files."""
    return float((load_file(original_file)["last"] - load_file(converted_file)["last"]).abs().max())


def _differing_keys(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """The keys whose values differ, sorted."""
    return sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))


def compare_answers(
    original: list[dict[str, Any]], converted: list[dict[str, Any]], num_questions: int
) -> ConversionGate:
    """Compares the generated answers and what was thought before them, word for word."""
    if not len(original) == len(converted) == num_questions:
        return ConversionGate(
            "text", False, f"{len(original)} and {len(converted)} answers to {num_questions} questions"
        )
    details = []
    for original_line, converted_line in zip(original, converted, strict=True):
        for text_part in ("answer", "thinking"):
            if original_line[text_part] != converted_line[text_part]:
                original_text = (original_line[text_part] or "")[:200]
                converted_text = (converted_line[text_part] or "")[:200]
                details.append(f"{original_line['index']}: {original_text!r} against {converted_text!r}")
                break

    if details:
        return ConversionGate("text", False, f"{len(details)} of {num_questions} answers differ", details)
    return ConversionGate("text", True, f"{num_questions} answers identical")


def compare_scores(checkpoints: dict[str, dict[str, Any]]) -> ConversionGate:
    """Compares the benchmark's metrics.

    Every checkpoint must have some, and those of the converted one must equal those of the original.

    Args:
        checkpoints: role -> facts, with "metrics" (metric -> value) and "problem" (what went wrong, if
            anything); the trained checkpoint may have any values.
    """
    missing_scores = []
    for role, facts in checkpoints.items():
        if not facts["metrics"]:
            missing_scores.append(f"{role}: no metric; {facts['problem'] or 'VLMEvalKit gives no reason'}")
    if missing_scores:
        measured_text = f"{len(missing_scores)} of {len(checkpoints)} checkpoints have no score"
        return ConversionGate("scores", False, measured_text, missing_scores)

    expected, actual = checkpoints["original"]["metrics"], checkpoints["converted"]["metrics"]
    details = []
    for name in _differing_keys(expected, actual):
        details.append(f"{name}: {expected.get(name)} against {actual.get(name)}")
    trained = checkpoints.get("trained", checkpoints["original"])["metrics"]
    if trained.keys() != expected.keys():
        details.append(
            f"the trained checkpoint has metrics {sorted(trained)}, the original {sorted(expected)}"
        )

    if details:
        return ConversionGate("scores", False, f"{len(details)} of {len(expected)} metrics differ", details)
    return ConversionGate("scores", True, "all metrics equal: " + ", ".join(expected))
