"""Makes command lines from dataclasses: a field is an option, its type says how to read the value, and its
docstring is the help.

A field ``media_root`` is the option ``--media-root``. The parser is jsonargparse's, as in the trainer. A
command that sets ``run_fields`` also takes ``--config RUN.yaml`` and every field of a run by its dotted name,
spelled as in the YAML.

Nothing here imports torch, so that ``--help`` and errors in command lines appear at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import types
import typing
from pathlib import Path
from typing import Any, ClassVar, Literal

from megatron_vl.errors import UsageError

MISSING = dataclasses.MISSING


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


def option(
    default: Any = MISSING,
    *,
    metavar: str = "",
    shown_default: str = "",
    least: int | None = None,
    share: bool = False,
    positional: bool = False,
    repeat: bool = False,
    several: bool = False,
    must_exist: bool = False,
) -> Any:
    """Declares an option: a field of a command's options.

    Args:
        default: the value without the option. If it is left out, the option is required.
        metavar: the name of the value in ``--help``.
        shown_default: the default as ``--help`` shows it; empty: the value itself.
        least: smallest valid whole number.
        share: whether the value is a number from 0 to 1.
        positional: whether the value is a word without an option name.
        repeat: whether to make a list, with one item each time the option is given.
        several: whether to make a list of all words after the option.
        must_exist: whether to refuse a path that does not exist.
    """
    facts = {
        "metavar": metavar,
        "shown_default": shown_default,
        "least": least,
        "share": share,
        "positional": positional,
    }
    facts |= {"repeat": repeat, "several": several, "must_exist": must_exist}
    if default is MISSING:
        return dataclasses.field(metadata=facts)
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=facts)
    return dataclasses.field(default=default, metadata=facts)


# --- Reading a command line ---------------------------------------------------------------------------------


def parse[Options: CommandOptions](options: type[Options], argv: list[str], program: str) -> Options:
    """Reads the options of a command line.

    Args:
        program: how the command is called, used in messages: ``megatron-vl split``.

    Raises:
        UsageError: the command line is invalid. The message says why.
        SystemExit: ``--help`` was requested and has been printed.
    """
    from jsonargparse import ArgumentError

    parser = build_parser(options, program)
    own, run_words = _split(parser, argv) if options.run_fields else (argv, [])
    if "-h" in own or "--help" in own:
        print(help_text(options, program), end="")
        raise SystemExit(0)

    try:
        values = parser.parse_args(own)
    except (ArgumentError, ValueError, TypeError) as error:
        raise UsageError(f"{_as_spelled(str(error), options)}; see {program} --help") from error

    given = {field.name: getattr(values, field.name) for field in _shown(options)}
    parsed = options(fields=run_words, **{name: value for name, value in given.items() if value is not None})
    parsed.check()
    return parsed


def _as_spelled(message: str, options: type[CommandOptions]) -> str:
    """jsonargparse's message on one line, with missing options spelled as on the command line."""
    message = " ".join(message.split())
    start, colon, names = message.partition("the following arguments are required: ")
    if not colon:
        return message
    positional = {field.name for field in _shown(options) if field.metadata.get("positional")}
    missing = [name if name in positional else kebab(name) for name in names.split(", ")]
    return f"{', '.join(missing)} must be given"


def check_paths(options: CommandOptions) -> None:
    """Raises FileNotFoundError for input paths that do not exist."""
    for field in _shown(type(options)):
        value = getattr(options, field.name)
        if not field.metadata.get("must_exist") or value is None:
            continue
        for path in value if isinstance(value, list) else [value]:
            _check_path(Path(path), is_hf=field.name in ("hf", "original"))


def _check_path(path: Path, is_hf: bool) -> None:
    # Users may give the name of a repository on the Hugging Face hub, which is not a folder.
    advice = (
        "; give the folder of a downloaded checkpoint (hf download REPOSITORY --local-dir FOLDER)"
        if is_hf
        else ""
    )
    try:
        path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist{advice}") from None
    except OSError:
        pass  # the command itself reports what is wrong


def exactly_one(options: CommandOptions, *names: str) -> None:
    """Raises UsageError unless exactly one of these options is given."""
    given = [name for name in names if getattr(options, name)]
    if len(given) != 1:
        spelled = " or ".join(kebab(name) for name in names)
        raise UsageError(f"give {spelled}" + (", not both" if given else ""))


def words(options: CommandOptions, leave_out: tuple[str, ...] = ()) -> list[str]:
    """The command line that sets these options in another process, without options at their defaults."""
    line: list[str] = []
    for field in _shown(type(options)):
        value = getattr(options, field.name)
        if field.name in leave_out or value in (None, False, field.default):
            continue
        line += [kebab(field.name)] if value is True else [kebab(field.name), str(value)]
    return line


# --- The parser ---------------------------------------------------------------------------------------------


def kebab(name: str) -> str:
    """Turns ``media_root`` into ``--media-root``."""
    return "--" + name.replace("_", "-")


def build_parser(options: type[CommandOptions], program: str) -> Any:
    """Builds jsonargparse's parser for a command's own options."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog=program,
        usage=_usage(options, program),
        description=_description(options),
        epilog=options.epilog or None,
        formatter_class=_help_formatter(),
        exit_on_error=False,
        allow_abbrev=False,  # an option that is added later must not change what an abbreviation means
    )
    hints = typing.get_type_hints(options)
    texts = _field_texts(options)
    for field in _shown(options):
        names, arguments = _argument(field, hints[field.name])
        parser.add_argument(*names, help=_help(field, texts[field.name]), **arguments)
    return parser


def summary(options: type[CommandOptions]) -> str:
    """The first sentence of a command's description."""
    return _description(options).split(". ")[0].rstrip(".")


def help_text(options: type[CommandOptions], program: str) -> str:
    """The help of all options of a command, including the fields of a run."""
    text = build_parser(options, program).format_help()
    if not options.run_fields:
        return text
    from megatron_vl.config import build_parser as build_run_parser

    run_help = build_run_parser().format_help()
    fields = run_help[run_help.index("\n  --config") + 1 :]
    return f"{text}\nfields of a run, as in its YAML:\n{fields}"


def _argument(field: dataclasses.Field, hint: Any) -> tuple[list[str], dict[str, Any]]:
    """Names and keyword arguments for ``add_argument``."""
    facts = field.metadata
    required = field.default is MISSING and field.default_factory is MISSING
    names = [field.name] if facts.get("positional") else [kebab(field.name)]
    if hint is bool:
        return names, {"action": "store_true", "default": False}

    arguments: dict[str, Any] = {"default": None, "type": _reader(hint, facts)}
    choices = _choices(hint)
    if facts.get("metavar") or not choices:
        arguments["metavar"] = facts.get("metavar") or "VALUE"
    if choices:
        arguments |= {"type": str, "choices": choices}
    if facts.get("repeat"):
        arguments["action"] = "append"
    if facts.get("several"):
        arguments["nargs"] = "+"
    if facts.get("positional"):
        del arguments["default"]
        return names, arguments | ({} if required else {"nargs": "?"})
    return names, arguments | {"required": required}


def _reader(hint: Any, facts: typing.Mapping[str, Any]) -> Any:
    """The function that turns one word into a value."""
    kind = _plain(hint)
    if kind is int and facts.get("least") is not None:
        return functools.partial(_whole_number, facts["least"])
    if kind is float and facts.get("share"):
        return _share
    if typing.get_origin(kind) is not list:
        return kind
    item = typing.get_args(kind)[0]
    if facts.get("several"):
        return item
    return _Words(item) if facts.get("repeat") else _numbers


class _Words:
    """Reads a list that is given item by item. jsonargparse also passes it the list read so far."""

    def __init__(self, item: type) -> None:
        self.item = item

    def __call__(self, word: Any) -> Any:
        return [self.item(each) for each in word] if isinstance(word, list) else self.item(word)


def _whole_number(least: int, word: Any) -> int:
    if not str(word).isdecimal() or int(word) < least:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least {least}")
    return int(word)


def _share(word: Any) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number from 0 to 1")
    return value


def _numbers(word: Any) -> list[int]:
    """Reads whole numbers separated by commas."""
    if isinstance(word, list):
        return word
    try:
        return [int(part) for part in str(word).split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a list of numbers such as 6,8,8,6") from None


def _plain(hint: Any) -> Any:
    """A type without its ``| None``."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _choices(hint: Any) -> tuple[Any, ...]:
    kind = _plain(hint)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _shown(options: type[CommandOptions]) -> list[dataclasses.Field]:
    """The fields that are options: first those of the class itself, then those of its bases."""
    found = [field for field in dataclasses.fields(options) if not field.metadata.get("hidden")]
    own = set(vars(options).get("__annotations__", ()))
    return sorted(found, key=lambda field: field.name not in own)


# --- Words of the command line ------------------------------------------------------------------------------


def _split(parser: Any, argv: list[str]) -> tuple[list[str], list[str]]:
    """Separates the command's own options from the fields of a run, which may follow ``--``.

    The command's own options take precedence: ``--data DIR`` may be an option, although ``data`` is also a
    section of a run.
    """
    known = parser._option_string_actions
    before = argv[: argv.index("--")] if "--" in argv else argv
    own: list[str] = []
    fields: list[str] = []
    words = [*before]
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        action = known.get(name)
        if action is None:
            fields.append(word)
        elif action.nargs == 0:
            own.append(word)
        else:
            own += [word] if equals else [word, *words[:1]]
            words = words if equals else words[1:]

    return own, fields + argv[len(before) + 1 :]


# --- Help ---------------------------------------------------------------------------------------------------


def _description(options: type[CommandOptions]) -> str:
    return " ".join(inspect.cleandoc(options.__doc__ or "").split())


def _usage(options: type[CommandOptions], program: str) -> str | None:
    if not options.run_fields:
        return None
    required = [
        field for field in _shown(options) if field.default is MISSING and field.default_factory is MISSING
    ]
    words = [f"{kebab(field.name)} {field.metadata['metavar'] or 'VALUE'}" for field in required]
    return " ".join([program, *words, "[options] [--config RUN.yaml] [--section.field value ...]"])


def _field_texts(options: type[CommandOptions]) -> dict[str, str]:
    """Maps each field to its docstring."""
    from docstring_parser import parse_from_object

    texts: dict[str, str] = {}
    for base in reversed(options.__mro__):
        if dataclasses.is_dataclass(base):
            for item in parse_from_object(base).params:
                texts[item.arg_name] = " ".join((item.description or "").split())
    return texts


def _help(field: dataclasses.Field, text: str) -> str:
    default = field.default
    shown = field.metadata.get("shown_default")
    if shown:
        return f"{text.rstrip('.')} (default: {shown})".replace("%", "%%")
    if default in (MISSING, None, False, ""):
        return text.replace("%", "%%")
    return f"{text.rstrip('.')} (default: {default})".replace("%", "%%")


@functools.cache
def _help_formatter() -> type[argparse.HelpFormatter]:
    """argparse's formatter. Our help texts already contain what jsonargparse's formatter would add."""

    class Formatter(argparse.RawDescriptionHelpFormatter):
        """Wraps the description as prose, and keeps the lines of the epilog."""

        def _fill_text(self, text: str, width: int, indent: str) -> str:
            if "\n" in text:
                return super()._fill_text(text, width, indent)
            return argparse.HelpFormatter._fill_text(self, text, width, indent)

    return Formatter
