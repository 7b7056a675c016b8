"""The ``megatron-vl`` command: looks up the command, reads its options, runs it and shows its errors."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable

from megatron_vl.config.removed import REMOVED_COMMANDS
from megatron_vl.errors import UsageError, describe_error, exit_code_of_error
from megatron_vl.signals import open_missing_streams
from toolkit.commands import COMMANDS, Command, command_groups
from toolkit.options import CommandOptions, check_paths, command_summary, parse_command_line

PROGRAM_NAME = "megatron-vl"
PROGRAM_DESCRIPTION = "Convert, train and check Qwen-VL models with Megatron-core."
HELP_FLAGS = ("-h", "--help")


def main(argv: list[str] | None = None) -> int:
    """Runs a command. Returns its exit code: 1 for what a user can fix, 2 for an invalid command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    program_name = PROGRAM_NAME
    open_missing_streams()
    try:
        if argv[:1] == ["--version"]:
            print(versions())
            return 0
        if (
            not argv
            or argv[0] in HELP_FLAGS
            or argv[0] in command_groups()
            and argv[1:2]
            and argv[1] in HELP_FLAGS
        ):
            print(commands_overview(argv[0] if argv and argv[0] not in HELP_FLAGS else ""), end="")
            return 0 if argv else UsageError.exit_code

        command_name, option_words = find_command(argv)
        program_name = f"{PROGRAM_NAME} {command_name}"
        run_command, options = read_command_line(command_name, option_words)
        check_paths(options)
        return run_command(options) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        print(f"{program_name}: {describe_error(error)}", file=sys.stderr)
        return exit_code_of_error(error)


def versions() -> str:
    """A line for this program and each package that decides what a run computes, without importing torch."""
    from megatron_vl import __version__
    from toolkit.doctor.machine_checks import installed_version, transformer_engine_version

    version_by_package = {
        PROGRAM_NAME: __version__,
        "megatron-core": installed_version("megatron-core"),
        "torch": installed_version("torch"),
        "transformer-engine": transformer_engine_version(),
    }
    return "\n".join(f"{name} {version or 'not installed'}" for name, version in version_by_package.items())


def find_command(argv: list[str]) -> tuple[str, list[str]]:
    """Splits ``argv`` into the command's name and the words after it.

    Raises:
        UsageError: the command is unknown. The message lists similar names.
    """
    for length in (2, 1):
        name = " ".join(argv[:length])
        if name in COMMANDS:
            return name, argv[length:]
    raise UsageError(_unknown_command_message(argv))


def _unknown_command_message(argv: list[str]) -> str:
    """Explains that a command is unknown, and names similar ones."""
    first_word, second_words = argv[0], argv[1:2]
    for words in (f"{first_word} {' '.join(second_words)}", first_word):
        if words in REMOVED_COMMANDS:
            return f"the command {words} was removed: {REMOVED_COMMANDS[words]}"
    group_commands = {f"{first_word} {name}": name for name in command_groups().get(first_word, [])}
    if group_commands and not second_words:
        return f"{first_word} needs a command after it; valid: {', '.join(group_commands)}"

    if group_commands:
        similar_words = difflib.get_close_matches(second_words[0], group_commands.values(), 3)

        similar_commands = []
        for name, word in group_commands.items():
            if word in similar_words:
                similar_commands.append(name)
    else:
        similar_commands = difflib.get_close_matches(first_word, COMMANDS, 3)
    given_command = " ".join([first_word, *second_words]) if group_commands else first_word
    if similar_commands:
        return f"unknown command: {given_command}; did you mean {' or '.join(similar_commands)}?"
    return f"unknown command: {given_command}; valid: {', '.join(group_commands or COMMANDS)}"


def read_command_line(
    command_name: str, option_words: list[str]
) -> tuple[Callable[[CommandOptions], int], CommandOptions]:
    """Returns a command's function, which imports its module when called, and its parsed options.

    Raises:
        UsageError: the options are invalid.
        SystemExit: ``--help`` was requested and has been printed.
    """
    command: Command = COMMANDS[command_name]
    options_class = command.load_options_class()
    parsed_options = parse_command_line(options_class, option_words, f"{PROGRAM_NAME} {command_name}")
    return lambda options: command.load_function()(options), parsed_options


def commands_overview(group_name: str = "") -> str:
    """Lists all commands, or those of a group, each with its first sentence."""
    lines = [f"usage: {PROGRAM_NAME} {group_name or 'COMMAND'} ...", "", PROGRAM_DESCRIPTION, ""]
    width = max(map(len, COMMANDS))
    for name, command in COMMANDS.items():
        if name.startswith(group_name):
            lines.append(f"  {name:<{width}}  {command_summary(command.load_options_class())}")
    lines += ["", f"{PROGRAM_NAME} COMMAND --help explains a command's options."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
