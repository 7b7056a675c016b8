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

from megatron_vl.config.options import MISSING, in_range
from megatron_vl.config.options import option as option
from megatron_vl.config.parsing import PARSER_ERRORS, explain
from megatron_vl.config.parsing import build_parser as run_parser
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


def parse[Options: CommandOptions](options: type[Options], argv: list[str], program: str) -> Options:
    """Reads the options of a command line.

    Args:
        program: how the command is called, used in messages: ``megatron-vl split``.

    Raises:
        UsageError: the command line is invalid. The message says why.
        SystemExit: ``--help`` was requested and has been printed.
    """
    parser = build_parser(options, program)
    own, run_words = _split(parser, argv) if options.run_fields else (argv, [])
    if "-h" in own or "--help" in own:
        print(help_text(options, program), end="")
        raise SystemExit(0)
    _refuse_misspelled(parser, run_words, program)

    try:
        values = parser.parse_args(own)
    except PARSER_ERRORS as error:
        raise UsageError(f"{_explain(str(error), options)}; see {program} --help") from error

    given = {field.name: getattr(values, field.name) for field in shown_options(options)}
    parsed = options(fields=run_words, **{name: value for name, value in given.items() if value is not None})
    parsed.check()
    return parsed


def _explain(message: str, options: type[CommandOptions]) -> str:
    """jsonargparse's message in one line, with options spelled as on the command line."""
    types = {name: _plain(hint) for name, hint in typing.get_type_hints(options).items()}
    return explain(message, types, {field.name: _option_string(field) for field in shown_options(options)})[0]


def check_paths(options: CommandOptions) -> None:
    """Raises FileNotFoundError for input paths that do not exist."""
    for field in shown_options(type(options)):
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
    for field in shown_options(type(options)):
        value = getattr(options, field.name)
        if field.name in leave_out or value in (None, False, field.default):
            continue
        line += [kebab(field.name)] if value is True else [kebab(field.name), str(value)]
    return line


# --- The parser ---------------------------------------------------------------------------------------------


def kebab(name: str) -> str:
    """Turns ``media_root`` into ``--media-root``."""
    return "--" + name.replace("_", "-")


def build_parser(options: type[CommandOptions], program: str) -> ArgumentParser:
    """Builds jsonargparse's parser for a command's own options."""
    parser = ArgumentParser(
        prog=program,
        usage=_usage(options, program),
        description=_description(options),
        epilog=options.epilog or None,
        formatter_class=_HelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,  # an option that is added later must not change what an abbreviation means
    )
    hints = typing.get_type_hints(options)
    texts = field_texts(options)
    for field in shown_options(options):
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
    run_help = run_parser().format_help()
    fields = run_help[run_help.index("\n  --config") + 1 :]
    return f"{text}\nfields of a run, as in its YAML:\n{fields}"


def _argument(field: dataclasses.Field, hint: Any) -> tuple[list[str], dict[str, Any]]:
    """Names and keyword arguments for ``add_argument``."""
    facts = field.metadata
    required = _is_required(field)
    names = [_option_string(field)]
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
    if kind in (int, float) and facts.get("least", -math.inf) > -math.inf:
        return functools.partial(_number, kind, facts)
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


def _number(kind: type, facts: typing.Mapping[str, Any], word: Any) -> Any:
    try:
        value = kind(word)
    except ValueError:
        value = math.nan
    if not in_range(value, facts):
        least, most = facts["least"], facts["most"]
        valid = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
        name = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{word!r} is not a {name} {valid}")
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


def _option_string(field: dataclasses.Field) -> str:
    return field.name if field.metadata.get("positional") else kebab(field.name)


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def shown_options(options: type[CommandOptions]) -> list[dataclasses.Field]:
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


def _refuse_misspelled(parser: Any, run_words: list[str], program: str) -> None:
    """Refuses words that are no field of a run, but nearly one of the command's own options.

    ``--nprocs`` is close to the first word of ``--nproc-per-node``.

    Raises:
        UsageError: the message names the option.
    """
    from megatron_vl.config import field_types

    alike: dict[str, list[str]] = {}
    for name in parser._option_string_actions:
        for start in {name, "-".join(name.split("-")[:3])}:
            alike.setdefault(start, []).append(name)

    for word in run_words:
        given = word.partition("=")[0]
        if not given.startswith("--") or "." in given or given[2:] in (*field_types(), "config"):
            continue
        close = difflib.get_close_matches(given, alike, 1, cutoff=0.85)
        if close:
            near = " or ".join(alike[close[0]])
            raise UsageError(f"option {given} is unknown; did you mean {near}? See {program} --help")


# --- Help ---------------------------------------------------------------------------------------------------


def _description(options: type[CommandOptions]) -> str:
    return " ".join(inspect.cleandoc(options.__doc__ or "").split())


def _usage(options: type[CommandOptions], program: str) -> str | None:
    if not options.run_fields:
        return None
    required = [field for field in shown_options(options) if _is_required(field)]
    words = [f"{kebab(field.name)} {field.metadata['metavar'] or 'VALUE'}" for field in required]
    return " ".join([program, *words, "[options] [--config RUN.yaml] [--section.field value ...]"])


def field_texts(options: type) -> dict[str, str]:
    """Maps each field to its docstring."""
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


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the description as prose, and keeps the lines of the epilog.

    Help texts already contain what jsonargparse's formatter would add.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)
