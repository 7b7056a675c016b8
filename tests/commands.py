"""Finds command lines in shell scripts and Markdown, and reads them with the parsers of the commands."""

import re
import shlex
from pathlib import Path

from megatron_vl.config import TrainConfig, parse_config
from megatron_vl.system.errors import UserError
from toolkit.cli import find_command, read_command_line
from toolkit.common.options import CommandOptions
from toolkit.train.options import TrainOptions

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")


def logical_lines(text: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", " ", text)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def words_of(line: str) -> list[str]:
    """The words of a command line, without comments; variables become their defaults or their names."""
    return shlex.split(VARIABLE.sub(lambda match: match[2] or match[1], line), comments=True)


def from_root(words: list[str]) -> list[str]:
    """Replaces names of the checkout's own files by absolute paths."""
    return [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]


def megatron_vl_command(line: str) -> tuple[str, CommandOptions | None]:
    words = words_of(line)
    assert words[0] == "megatron-vl"
    if words[-1] in ("--help", "--version"):
        return "", None
    try:
        name, rest = find_command(words[1:])
        options = read_command_line(name, from_root(rest))
        if options.run_fields and options.fields:
            config = ["--config", str(options.config)] if getattr(options, "config", None) else []
            parse_config([*config, *options.fields])
        return name, options
    except UserError as error:
        raise AssertionError(f"not a valid command: {line}: {error}") from error


def trainer_config(line: str) -> tuple[TrainConfig, int] | None:
    """Configuration and number of ranks of a training's command line; None if it only asks for ``--help``."""
    words = words_of(line)
    if "--help" in words:
        return None
    if words[:2] == ["megatron-vl", "train"]:
        options = read_command_line("train", from_root(words[2:]))
        assert isinstance(options, TrainOptions)
        return parse_config(options.fields), (options.nproc_per_node or 8) * (options.nnodes or 1)
    ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
    return parse_config(from_root(words[words.index("megatron_vl.train") + 1 :])), ranks
