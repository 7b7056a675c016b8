"""Makes command lines from dataclasses.

A field is an option. Its type says how to read the value, and its docstring is the help. A field
``media_root`` is the option ``--media-root``. The parser is jsonargparse's, as in the trainer. A command that
sets ``run_fields`` also takes ``--config RUN.yaml`` and every field of a run by its dotted name, spelled as
in the YAML.

Nothing here imports torch, so that ``--help`` and errors in command lines appear at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import inspect
import math
import types
import typing
from pathlib import Path
from typing import Any, ClassVar, Literal

from docstring_parser import parse_from_object
from jsonargparse import ArgumentParser

from megatron_vl.config.options import MISSING, is_in_range
from megatron_vl.config.options import option as option
from megatron_vl.config.parsing import PARSER_ERRORS, explain_parser_error
from megatron_vl.config.parsing import build_parser as run_parser
from megatron_vl.config.removed import REMOVED_OPTIONS
from megatron_vl.errors import UsageError


@dataclasses.dataclass(kw_only=True)
class CommandOptions:
    """Base of each command's options. The first paragraph of a subclass's docstring describes the command."""

    run_fields: ClassVar[bool] = False
    """Whether the command takes ``--config RUN.yaml`` and the dotted fields of a run."""
    epilog: ClassVar[str] = ""
    """Text below the options in ``--help``."""

    fields: list[str] = dataclasses.field(default_factory=list, metadata={"hidden": True})
    """The words of the command line that set fields of a run, in order."""

    def check(self) -> None:
        """Raises UsageError if options contradict each other."""


# --- Reading a command line ---------------------------------------------------------------------------------


def parse_command_line[Options: CommandOptions](
    options_class: type[Options], argv: list[str], program_name: str
) -> Options:
    """Reads the options of a command line.

    Args:
        program_name: how the command is called, used in messages: ``megatron-vl split``.

    Raises:
        UsageError: the command line is invalid. The message says why.
        SystemExit: ``--help`` was requested and has been printed.
    """
    parser = build_parser(options_class, program_name)
    command_words, run_words = _split_run_words(parser, argv) if options_class.run_fields else (argv, [])
    if "-h" in command_words or "--help" in command_words:
        print(help_text(options_class, program_name), end="")
        raise SystemExit(0)
    for word in argv:
        command_option = f"{program_name.removeprefix('megatron-vl ')} {word.partition('=')[0]}"
        if command_option in REMOVED_OPTIONS:
            raise UsageError(f"{command_option} was removed: {REMOVED_OPTIONS[command_option]}")
    _refuse_misspelled(parser, run_words, program_name)

    try:
        parsed_values = parser.parse_args(command_words)
    except PARSER_ERRORS as error:
        raise UsageError(
            f"{_explain_parser_error(str(error), options_class)}; see {program_name} --help"
        ) from error

    given_values = {}
    for field in shown_options(options_class):
        value = getattr(parsed_values, field.name)
        if value is not None:  # otherwise the field keeps its default
            given_values[field.name] = value
    parsed_options = options_class(fields=run_words, **given_values)
    parsed_options.check()
    return parsed_options


def _explain_parser_error(error_message: str, options_class: type[CommandOptions]) -> str:
    """jsonargparse's message in one line, with options spelled as on the command line."""
    type_hints = typing.get_type_hints(options_class)
    types_by_field = {name: _without_none(type_hint) for name, type_hint in type_hints.items()}
    option_strings = {field.name: _option_string(field) for field in shown_options(options_class)}
    return explain_parser_error(error_message, types_by_field, option_strings)[0]


def check_paths(options: CommandOptions) -> None:
    """Raises FileNotFoundError for input paths that do not exist."""
    for field in shown_options(type(options)):
        value = getattr(options, field.name)
        if not field.metadata.get("must_exist") or value is None:
            continue
        for path in value if isinstance(value, list) else [value]:
            _check_path(Path(path), is_hf=field.name in ("hf", "original"))


def _check_path(input_path: Path, is_hf: bool) -> None:
    # Users may give the name of a repository on the Hugging Face hub, which is not a folder.
    download_advice = (
        "; give the folder of a downloaded checkpoint (hf download REPOSITORY --local-dir FOLDER)"
        if is_hf
        else ""
    )
    try:
        input_path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"{input_path} does not exist{download_advice}") from None
    except OSError:
        pass  # the command itself reports what is wrong


def require_exactly_one(options: CommandOptions, *option_names: str) -> None:
    """Raises UsageError unless exactly one of these options is given."""
    given_names = [name for name in option_names if getattr(options, name)]
    if len(given_names) != 1:
        option_flags = " or ".join(option_flag(name) for name in option_names)
        raise UsageError(f"give {option_flags}" + (", not both" if given_names else ""))


def to_command_line(options: CommandOptions, leave_out: tuple[str, ...] = ()) -> list[str]:
    """The command line that sets these options in another process, without options at their defaults."""
    line: list[str] = []
    for field in shown_options(type(options)):
        value = getattr(options, field.name)
        is_left_out = field.name in leave_out or value is None or value is False  # 0 equals False
        if is_left_out or value == field.default:
            continue
        line += [option_flag(field.name)] if value is True else [option_flag(field.name), str(value)]
    return line


# --- The parser ---------------------------------------------------------------------------------------------


def option_flag(field_name: str) -> str:
    """Turns ``media_root`` into ``--media-root``."""
    return "--" + field_name.replace("_", "-")


def build_parser(options_class: type[CommandOptions], program_name: str) -> ArgumentParser:
    """Builds jsonargparse's parser for a command's own options."""
    parser = ArgumentParser(
        prog=program_name,
        usage=_usage_line(options_class, program_name),
        description=_command_description(options_class),
        epilog=options_class.epilog or None,
        formatter_class=_HelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,  # an option that is added later must not change what an abbreviation means
    )
    type_hints = typing.get_type_hints(options_class)
    help_texts = field_docstrings(options_class)
    for option_field in shown_options(options_class):
        option_strings, argument_settings = _parser_argument(option_field, type_hints[option_field.name])
        parser.add_argument(
            *option_strings,
            help=_option_help(option_field, help_texts[option_field.name]),
            **argument_settings,
        )
    return parser


def command_summary(options_class: type[CommandOptions]) -> str:
    """The first sentence of a command's description."""
    return _command_description(options_class).split(". ")[0].rstrip(".")


def help_text(options_class: type[CommandOptions], program_name: str) -> str:
    """The help of all options of a command, including the fields of a run."""
    text = build_parser(options_class, program_name).format_help()
    if not options_class.run_fields:
        return text
    run_help = run_parser().format_help()
    fields = run_help[run_help.index("\n  --config") + 1 :]
    return f"{text}\nfields of a run, as in its YAML:\n{fields}"


def _parser_argument(option_field: dataclasses.Field, type_hint: Any) -> tuple[list[str], dict[str, Any]]:
    """Names and keyword arguments for ``add_argument``."""
    field_metadata = option_field.metadata
    is_required = _is_required(option_field)
    option_strings = [_option_string(option_field)]
    if type_hint is bool:
        return option_strings, {"action": "store_true", "default": False}

    argument_settings: dict[str, Any] = {"default": None, "type": _value_reader(type_hint, field_metadata)}
    valid_values = _literal_values(type_hint)
    if field_metadata.get("metavar") or not valid_values:
        argument_settings["metavar"] = field_metadata.get("metavar") or "VALUE"
    if valid_values:
        argument_settings |= {"type": str, "choices": valid_values}
    if field_metadata.get("repeat"):
        argument_settings["action"] = "append"
    if field_metadata.get("several"):
        argument_settings["nargs"] = "+"
    if field_metadata.get("positional"):
        del argument_settings["default"]
        return option_strings, argument_settings | ({} if is_required else {"nargs": "?"})
    return option_strings, argument_settings | {"required": is_required}


def _value_reader(type_hint: Any, field_metadata: typing.Mapping[str, Any]) -> Any:
    """The function that turns one word into a value."""
    kind = _without_none(type_hint)
    if kind in (int, float) and field_metadata.get("minimum", -math.inf) > -math.inf:
        return functools.partial(_read_number, kind, field_metadata)
    if typing.get_origin(kind) is not list:
        return kind
    item = typing.get_args(kind)[0]
    if field_metadata.get("several"):
        return item
    return _RepeatedValueReader(item) if field_metadata.get("repeat") else _read_number_list


class _RepeatedValueReader:
    """Reads a list that is given item by item. jsonargparse also passes it the list read so far."""

    def __init__(self, item_type: type) -> None:
        self.item_type = item_type

    def __call__(self, word_or_words: Any) -> Any:
        if isinstance(word_or_words, list):
            return list(map(self.item_type, word_or_words))
        return self.item_type(word_or_words)


def _read_number(number_type: type, field_metadata: typing.Mapping[str, Any], option_word: Any) -> Any:
    try:
        value = number_type(option_word)
    except ValueError:
        value = math.nan
    if not is_in_range(value, field_metadata):
        minimum, maximum = field_metadata["minimum"], field_metadata["maximum"]
        range_text = f"from {minimum:g} to {maximum:g}" if maximum < math.inf else f"of at least {minimum:g}"
        number_text = "whole number" if number_type is int else "number"
        raise argparse.ArgumentTypeError(f"{option_word!r} is not a {number_text} {range_text}")
    return value


def _read_number_list(option_word: Any) -> list[int]:
    """Reads whole numbers separated by commas."""
    if isinstance(option_word, list):
        return option_word
    try:
        return [int(part) for part in str(option_word).split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{option_word!r} is not a list of numbers such as 6,8,8,6"
        ) from None


def _without_none(type_hint: Any) -> Any:
    """A type without its ``| None``."""
    if typing.get_origin(type_hint) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(type_hint) if part is not type(None))
    return type_hint


def _literal_values(type_hint: Any) -> tuple[Any, ...]:
    kind = _without_none(type_hint)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _option_string(option_field: dataclasses.Field) -> str:
    return option_field.name if option_field.metadata.get("positional") else option_flag(option_field.name)


def _is_required(option_field: dataclasses.Field) -> bool:
    return option_field.default is MISSING and option_field.default_factory is MISSING


def shown_options(options_class: type[CommandOptions]) -> list[dataclasses.Field]:
    """The fields that are options: first those of the class itself, then those of its bases."""
    all_fields = dataclasses.fields(options_class)
    visible_fields = [field for field in all_fields if not field.metadata.get("hidden")]
    own_field_names = set(vars(options_class).get("__annotations__", ()))
    return sorted(visible_fields, key=lambda field: field.name not in own_field_names)


# --- Words of the command line ------------------------------------------------------------------------------


def _split_run_words(parser: Any, argv: list[str]) -> tuple[list[str], list[str]]:
    """Separates the command's own options from the fields of a run, which may follow ``--``.

    The command's own options take precedence: ``--data DIR`` may be an option, although ``data`` is also a
    section of a run.
    """
    option_actions = parser._option_string_actions
    words_before_separator = argv[: argv.index("--")] if "--" in argv else argv
    command_words: list[str] = []
    run_words: list[str] = []
    remaining_words = [*words_before_separator]
    while remaining_words:
        current_word = remaining_words.pop(0)
        option_string, equals_sign, _ = current_word.partition("=")
        option_action = option_actions.get(option_string)
        if option_action is None:
            run_words.append(current_word)
        elif option_action.nargs == 0:
            command_words.append(current_word)
        else:
            command_words += [current_word] if equals_sign else [current_word, *remaining_words[:1]]
            remaining_words = remaining_words if equals_sign else remaining_words[1:]

    return command_words, run_words + argv[len(words_before_separator) + 1 :]


def _refuse_misspelled(parser: Any, run_words: list[str], program_name: str) -> None:
    """Refuses words that are no field of a run, but nearly one of the command's own options.

    ``--nprocs`` is close to the first word of ``--nproc-per-node``.

    Raises:
        UsageError: the message names the option.
    """
    from megatron_vl.config import field_types

    options_by_prefix: dict[str, list[str]] = {}
    for option_string in parser._option_string_actions:
        for option_prefix in {option_string, "-".join(option_string.split("-")[:3])}:
            options_by_prefix.setdefault(option_prefix, []).append(option_string)

    for run_word in run_words:
        given_option = run_word.partition("=")[0]
        if (
            not given_option.startswith("--")
            or "." in given_option
            or given_option[2:] in (*field_types(), "config")
        ):
            continue
        close_prefixes = difflib.get_close_matches(given_option, options_by_prefix, 1, cutoff=0.85)
        if close_prefixes:
            suggested_options = " or ".join(options_by_prefix[close_prefixes[0]])
            raise UsageError(
                f"option {given_option} is unknown; did you mean "
                f"{suggested_options}? See {program_name} --help"
            )


# --- Help ---------------------------------------------------------------------------------------------------


def _command_description(options_class: type[CommandOptions]) -> str:
    return " ".join(inspect.cleandoc(options_class.__doc__ or "").split())


def _usage_line(options_class: type[CommandOptions], program_name: str) -> str | None:
    if not options_class.run_fields:
        return None

    required_fields = []
    for field in shown_options(options_class):
        if _is_required(field):
            required_fields.append(field)

    usage_words = []
    for field in required_fields:
        usage_words.append(f"{option_flag(field.name)} {field.metadata['metavar'] or 'VALUE'}")

    return " ".join([program_name, *usage_words, "[options] [--config RUN.yaml] [--section.field value ...]"])


def field_docstrings(options_class: type) -> dict[str, str]:
    """Maps each field to its docstring."""
    texts_by_field: dict[str, str] = {}
    for base_class in reversed(options_class.__mro__):
        if dataclasses.is_dataclass(base_class):
            for item in parse_from_object(base_class).params:
                texts_by_field[item.arg_name] = " ".join((item.description or "").split())
    return texts_by_field


def _option_help(option_field: dataclasses.Field, field_docstring: str) -> str:
    default_value = option_field.default
    shown_default = option_field.metadata.get("shown_default")
    if shown_default:
        return f"{field_docstring.rstrip('.')} (default: {shown_default})".replace("%", "%%")
    if default_value in (MISSING, None, False, ""):
        return field_docstring.replace("%", "%%")
    return f"{field_docstring.rstrip('.')} (default: {default_value})".replace("%", "%%")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the description as prose, and keeps the lines of the epilog.

    Help texts already contain what jsonargparse's formatter would add.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)
