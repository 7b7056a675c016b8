"""``megatron-vl demo``: the whole path on CPU, from a Hugging Face folder through 3D-parallel training and back."""

from __future__ import annotations

import argparse
from pathlib import Path


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    text = "train a small Qwen2.5-VL under tensor x pipeline parallelism on CPU and check every step of the way"
    parser = subparsers.add_parser("demo", help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="folder for everything it writes (default: .demo)")
    parser.add_argument(
        "--steps",
        type=_steps,
        default=60,
        metavar="N",
        help="training steps (default: 60; fewer may not be enough to learn the answers)",
    )
    parser.set_defaults(run=_run)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps of at least 12")
    return int(text)


def _run(args: argparse.Namespace) -> int:
    from toolkit.demo.run import run_demo

    return run_demo(args.dir, args.steps)
