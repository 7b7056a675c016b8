"""The ``megatron-vl`` command: looks up the command, reads its options, runs it and shows its errors."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable

from megatron_vl.errors import UsageError, describe, exit_code
from toolkit.commands import COMMANDS, Command, groups
from toolkit.options import CommandOptions, check_paths, parse, summary

PROGRAM = "megatron-vl"
DESCRIPTION = "Convert, train and check Qwen-VL models with Megatron-core."
HELP = ("-h", "--help")


def main(argv: list[str] | None = None) -> int:
    """Runs a command. Returns its exit code: 1 for what a user can fix, 2 for an invalid command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    program = PROGRAM
    try:
        if argv[:1] == ["--version"]:
            print(versions())
            return 0
        if not argv or argv[0] in HELP or argv[0] in groups() and argv[1:2] and argv[1] in HELP:
            print(overview(argv[0] if argv and argv[0] not in HELP else ""), end="")
            return 0 if argv else UsageError.exit_code

        name, words = find_command(argv)
        program = f"{PROGRAM} {name}"
        function, options = read(name, words)
        check_paths(options)
        return function(options) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        print(f"{program}: {describe(error)}", file=sys.stderr)
        return exit_code(error)


def versions() -> str:
    """A line for this program and each package that decides what a run computes, without importing torch."""
    from megatron_vl import __version__
    from toolkit.doctor.machine import TE_PARTS, installed

    transformer_engine = next(filter(None, map(installed, TE_PARTS)), None)
    found = {
        PROGRAM: __version__,
        "megatron-core": installed("megatron-core"),
        "torch": installed("torch"),
        "transformer-engine": transformer_engine,
    }
    return "\n".join(f"{name} {version or 'not installed'}" for name, version in found.items())


def find_command(argv: list[str]) -> tuple[str, list[str]]:
    """Splits ``argv`` into the command's name and the words after it.

    Raises:
        UsageError: the command is unknown. The message lists similar names.
    """
    for length in (2, 1):
        name = " ".join(argv[:length])
        if name in COMMANDS:
            return name, argv[length:]
    raise UsageError(_unknown(argv))


def _unknown(argv: list[str]) -> str:
    """What to say of a command that there is not."""
    first, second = argv[0], argv[1:2]
    within = {f"{first} {name}": name for name in groups().get(first, [])}
    if within and not second:
        return f"{first} needs a command after it; valid: {', '.join(within)}"

    if within:
        alike = difflib.get_close_matches(second[0], within.values(), 3)
        near = [name for name, word in within.items() if word in alike]
    else:
        near = difflib.get_close_matches(first, COMMANDS, 3)
    given = " ".join([first, *second]) if within else first
    if near:
        return f"unknown command: {given}; did you mean {' or '.join(near)}?"
    return f"unknown command: {given}; valid: {', '.join(within or COMMANDS)}"


def read(name: str, words: list[str]) -> tuple[Callable[[CommandOptions], int], CommandOptions]:
    """Returns a command's function, which imports its module when called, and its parsed options.

    Raises:
        UsageError: the options are invalid.
        SystemExit: ``--help`` was requested and has been printed.
    """
    command: Command = COMMANDS[name]
    options = command.load_options()
    parsed = parse(options, words, f"{PROGRAM} {name}")
    return lambda given: command.load_function()(given), parsed


def overview(group: str = "") -> str:
    """Lists all commands, or those of a group, each with its first sentence."""
    lines = [f"usage: {PROGRAM} {group or 'COMMAND'} ...", "", DESCRIPTION, ""]
    width = max(map(len, COMMANDS))
    for name, command in COMMANDS.items():
        if name.startswith(group):
            lines.append(f"  {name:<{width}}  {summary(command.load_options())}")
    lines += ["", f"{PROGRAM} COMMAND --help explains a command's options."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
