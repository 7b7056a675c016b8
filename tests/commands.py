"""Command lines in shell scripts and Markdown: found, and validated with the parsers that would read them."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from megatron_vl.config import TrainConfig, parse_config
from toolkit.bench.options import parse as parse_bench
from toolkit.cli import build_parser

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")


def logical_lines(text: str) -> list[str]:
    """Lines with continuations joined, without comments and blank ones."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def megatron_vl_arguments(line: str) -> argparse.Namespace:
    """The parsed arguments of a ``megatron-vl`` command; fails the test with the parser's message."""
    words = shlex.split(VARIABLE.sub(lambda match: match[2] or match[1], line), comments=True)
    assert words[0] == "megatron-vl"
    try:
        arguments = build_parser().parse_args(words[1:])
        if arguments.command == "bench":  # its parser leaves the fields of a run to the benchmark's
            parse_bench(["--hf", arguments.hf, *(str(ROOT / w) if (ROOT / w).is_file() else w for w in arguments.options)])
        return arguments
    except SystemExit as error:
        if error.code == 0:  # --help, --version
            return argparse.Namespace()
        raise AssertionError(f"not a valid command: {line}") from error


def trainer_config(line: str, root: Path) -> TrainConfig | None:
    """The configuration of a ``... -m megatron_vl.train`` command, or None when it only asks for ``--help``."""
    words = shlex.split(VARIABLE.sub(lambda match: match[2] or match[1], line), comments=True)
    arguments = words[words.index("megatron_vl.train") + 1 :]
    if "--help" in arguments:
        return None
    return parse_config([str(root / word) if (root / word).is_file() else word for word in arguments])
