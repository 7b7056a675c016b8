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
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu", help="cuda needs Transformer Engine (default: cpu)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="processes, one a GPU with cuda (default: 4)")
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel size (default: 2)")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages (default: 2)")
    parser.add_argument("--raw", type=Path, default=None, help="raw data of an earlier demo (its raw/ folder) instead of new one")
    parser.set_defaults(run=_run)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps of at least 12")
    return int(text)


def _run(args: argparse.Namespace) -> int:
    from toolkit.demo.run import Machine, run_demo

    if args.ranks % (args.tp * args.pp):
        raise ValueError(f"--ranks {args.ranks} must be a multiple of --tp {args.tp} x --pp {args.pp}")
    return run_demo(args.dir, args.steps, Machine(args.platform, args.ranks, args.tp, args.pp), args.raw)
