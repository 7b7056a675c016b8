"""The ``megatron-vl`` command: one subcommand a module in :mod:`toolkit.commands`."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

COMMANDS = {
    "weights": "convert, split, merge, export, verify",
    "data": "data convert",
    "checkpoint": "checkpoint show, checkpoint verify",
    "evaluate": "evaluate",
    "parity": "parity",
    "generate": "generate",
    "demo": "demo",
    "bench": "bench",
    "doctor": "doctor",
}
"""Module of :mod:`toolkit.commands` -> the subcommands that it registers."""


DOWNLOAD = "; give the folder of a downloaded checkpoint (hf download REPOSITORY --local-dir FOLDER)"
"""Said of a missing Hugging Face folder: a repository's name on the hub is not one."""


class CommandError(Exception):
    """A failure the user can mend: printed without a traceback, exit code 1."""


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand; each sets ``run``, a function of the parsed arguments that returns the exit code."""
    from megatron_vl import __version__

    parser = argparse.ArgumentParser(
        prog="megatron-vl", description="Convert, train and check Qwen-VL models with Megatron-core."
    )
    parser.add_argument("--version", action="version", version=f"megatron-vl {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        importlib.import_module(f"toolkit.commands.{module}").register(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        hint = "; fields of a run go behind `--`" if args.command == "doctor" else f"; see megatron-vl {args.command} --help"
        parser.error(f"{args.command}: unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        _check_inputs(args)
        return args.run(args) or 0
    except (CommandError, ValueError, OSError) as error:
        print(f"megatron-vl {args.command}: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        from megatron_vl.training.optimizer_state import CheckpointError  # imports torch: behind an error only

        if not isinstance(error, CheckpointError):
            raise
        print(f"megatron-vl {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _check_inputs(args: argparse.Namespace) -> None:
    """The paths that a subcommand reads (``inputs``, the names of its arguments), before it imports anything heavy."""
    for name in getattr(args, "inputs", ()):
        value = getattr(args, name)
        for path in value if isinstance(value, list) else [value]:
            try:
                if path is not None:
                    Path(path).stat()
            except FileNotFoundError:
                raise FileNotFoundError(f"{path} does not exist{DOWNLOAD if name in ('hf', 'original') else ''}") from None
            except OSError:
                pass  # the subcommand tells what is wrong with it


if __name__ == "__main__":
    # As the module that the subcommands import: run as a script this one is another, with a CommandError of its own.
    from toolkit.cli import main as command

    sys.exit(command())
