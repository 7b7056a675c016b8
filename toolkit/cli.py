"""The ``megatron-vl`` command: looks up the command, reads its options, runs it and shows its errors."""

import sys

from megatron_vl.config.removed import REMOVED, explain_unknown
from megatron_vl.system.errors import UsageError, describe_error, exit_code_of_error
from megatron_vl.system.signals import open_missing_streams
from toolkit.commands import COMMANDS
from toolkit.common.options import CommandOptions, check_paths, parse_command_line

PROGRAM_NAME = "megatron-vl"
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
        group = "" if not argv or argv[0] in HELP_FLAGS else argv[0]
        if not group or commands_of(group) and argv[1:2] and argv[1] in HELP_FLAGS:
            print(commands_overview(group), end="")
            return 0 if argv else UsageError.exit_code
        command_name, option_args = find_command(argv)
        program_name = f"{PROGRAM_NAME} {command_name}"
        options = read_command_line(command_name, option_args)
        check_paths(options)
        return COMMANDS[command_name].load_function()(options) or 0
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


def commands_of(group: str) -> list[str]:
    """The commands of two words that begin with this one."""
    return [name for name in COMMANDS if name.startswith(f"{group} ")]


def find_command(argv: list[str]) -> tuple[str, list[str]]:
    """Splits ``argv`` into the command's name and the words after it.

    Raises:
        UsageError: the command is unknown. The message lists similar names.
    """
    for length in (2, 1):
        name = " ".join(argv[:length])
        if name in COMMANDS:
            return name, argv[length:]
    group_commands = commands_of(argv[0])
    if group_commands and not argv[1:]:
        raise UsageError(f"{argv[0]} needs a command after it; valid: {', '.join(group_commands)}")
    # A removed command may have been of two words, in a group that is still there or not.
    name = " ".join(argv[:2]) if group_commands or " ".join(argv[:2]) in REMOVED else argv[0]
    raise UsageError(explain_unknown(name, group_commands or list(COMMANDS)))


def read_command_line(command_name: str, option_args: list[str]) -> CommandOptions:
    """The options of a command.

    Raises:
        UsageError: the options are invalid.
        SystemExit: ``--help`` was requested and has been printed.
    """
    options_class = COMMANDS[command_name].load_options_class()
    return parse_command_line(options_class, option_args, f"{PROGRAM_NAME} {command_name}")


def commands_overview(group: str = "") -> str:
    lines = [f"usage: {PROGRAM_NAME} {group or 'COMMAND'} ...", ""]
    lines += ["Convert, train and check Qwen-VL models with Megatron-core.", ""]
    width = max(map(len, COMMANDS))
    for name in commands_of(group) if group else COMMANDS:
        description = " ".join((COMMANDS[name].load_options_class().__doc__ or "").split())
        lines.append(f"  {name:<{width}}  {description.split('. ')[0].rstrip('.')}")
    return "\n".join([*lines, "", f"{PROGRAM_NAME} COMMAND --help explains a command's options.", ""])
