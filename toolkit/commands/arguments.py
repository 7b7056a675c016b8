"""Types of arguments that several subcommands take."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 6,8,8,6") from None


VIDEO_RULES = {
    "video_positions": (("released", "transformers_5_3"), "Qwen2-VL and Qwen2.5-VL: positions at videos"),
    "video_prompt": (("released", "transformers_5_10"), "Qwen3-VL: text at videos"),
}
"""Field of a run's ``data`` -> its values, and what it is about; the config takes too long to import here."""


def add_video_rules(parser: argparse.ArgumentParser) -> None:
    """Adds ``--video-positions`` and ``--video-prompt``, for checkpoints trained under other rules."""
    for name, (values, what) in VIDEO_RULES.items():
        option = f"--{name.replace('_', '-')}"
        text = f"{what}, as data.{name} of the training (default: released)"
        parser.add_argument(option, choices=values, default="released", help=text)


def chosen_platform(wanted: str, option: str = "--platform") -> str:
    """``cuda`` or ``cpu``, as ``wanted`` or (``auto``) as there is.

    Raises:
        ValueError: CUDA is wanted, by ``option``, where torch sees no GPU.
    """
    import torch

    found = torch.cuda.is_available()
    if wanted == "cuda" and not found:
        raise ValueError(f"{option} cuda: torch sees no GPU here; leave it out, or give cpu (megatron-vl doctor says more)")
    return ("cuda" if found else "cpu") if wanted == "auto" else wanted
