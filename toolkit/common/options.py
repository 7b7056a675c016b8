"""Makes command lines from dataclasses.

A field is an option. Its type says how to read the value, and its docstring is the help. A field
``media_root`` is the option ``--media-root``. The parser is argparse's. A command that sets ``run_fields``
also takes ``--config RUN.yaml`` and every field of a run by its dotted name, spelled as in the YAML; these
words are left to :func:`megatron_vl.config.parse_config`.

Nothing here imports torch, so that ``--help`` and errors in command lines appear at once.
"""

import argparse
import dataclasses
import functools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object

from megatron_vl.config.fields import field_types
from megatron_vl.config.options import MISSING, valid_range
from megatron_vl.config.options import option as option
from megatron_vl.config.removed import explain_unknown
from megatron_vl.system.errors import UsageError
from megatron_vl.system.folder_kind import is_hub_name, why_no_model


@dataclasses.dataclass(kw_only=True)
class CommandOptions:
    """Base of each command's options. The first paragraph of a subclass's docstring describes the command."""

    run_fields: ClassVar[bool] = False
    """Whether the command takes ``--config RUN.yaml`` and the dotted fields of a run."""
    explains_run: ClassVar[bool] = False
    """Whether its ``--help`` explains the fields of a run. The other commands refer to it."""
    epilog: ClassVar[str] = ""
    """Text below the options in ``--help``."""

    fields: list[str] = dataclasses.field(default_factory=list, metadata={"hidden": True})
    """The words of the command line that set fields of a run, in order."""
    words: list[str] = dataclasses.field(default_factory=list, metadata={"hidden": True})

    def check(self) -> None:
        """Raises UsageError if options contradict each other."""


# --- Reading a command line ---------------------------------------------------------------------------------


def parse_command_line[Options: CommandOptions](
    options_class: type[Options], argv: Sequence[str], program_name: str
) -> Options:
    """Reads the options of a command line.

    Args:
        program_name: how the command is called, used in messages: ``megatron-vl split``.

    Raises:
        UsageError: the command line is invalid. The message says why.
        SystemExit: ``--help`` was requested and has been printed.
    """
    parser = build_parser(options_class, program_name)
    if options_class.explains_run and {"-h", "--help"} & {*argv}:
        from megatron_vl.config.parsing import run_fields_help  # jsonargparse takes a while

        print(parser.format_help() + "\nfields of a run, as in its YAML:\n" + run_fields_help(), end="")
        raise SystemExit(0)
    # Before argparse misses what a misspelled option would have given.
    options = (word for word in argv if word.startswith("--"))
    unknown = [word for word in options if word.partition("=")[0] not in parser._option_string_actions]
    parsed, unknown = (None, unknown) if unknown else parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        items = [item for item in shown_options(options_class) if not item.metadata.get("positional")]
        fields = [*field_types(), "config"] if options_class.run_fields else []
        known_names = [*(option_flag(item.name) for item in items), *(f"--{field}" for field in fields)]
        parser.error(explain_unknown(name, [*known_names, "--help"], argv[: argv.index(unknown[0])]))
    given = {name: value for name, value in vars(parsed).items() if value is not None}
    parsed_options = options_class(**given, words=[*argv])
    parsed_options.check()
    return parsed_options


def check_paths(options: CommandOptions) -> None:
    """Raises OSError for input paths that do not exist, and for folders where files belong."""
    for item in shown_options(type(options)):
        value = getattr(options, item.name)
        if item.metadata.get("must_exist") and value:
            for path in value if isinstance(value, list) else [value]:
                is_model = item.name == "hf" or is_hub_name(f"{path}")  # generate also takes a run
                check_path(Path(path), is_model and item.metadata["must_exist"] == "model")
                if item.metadata["metavar"] == "FILE" and Path(path).is_dir():
                    raise IsADirectoryError(f"{path} is a folder; --{item.name} takes a file")


def check_path(path: Path, is_model: bool) -> None:
    try:
        path.stat()
    except FileNotFoundError:
        # Users may give the name of a repository on the Hugging Face hub, which is not a folder.
        raise FileNotFoundError(why_no_model(path) if is_model else f"{path} does not exist") from None
    except OSError:
        pass  # the command itself reports what is wrong


# --- The parser ---------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def build_parser(options_class: type[CommandOptions], program_name: str) -> argparse.ArgumentParser:
    """Builds the parser of a command's own options and, unexplained, of the fields of a run."""
    run_help = "fields of a run, and --config RUN.yaml: `megatron-vl train --help`"
    run_help *= options_class.run_fields and not options_class.explains_run
    parser = _Parser(
        prog=program_name,
        description=textwrap.fill(" ".join((options_class.__doc__ or "").split()), width=100),
        epilog=f"{options_class.epilog}\n{run_help}".strip() or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an option that is added later must not change what an abbreviation means
    )
    type_hints, help_texts = get_type_hints(options_class), field_docstrings(options_class)
    for item in shown_options(options_class):
        name, settings = _parser_argument(item, type_hints[item.name])
        parser.add_argument(name, help=_option_help(item, help_texts[item.name]), **settings)
    for name in [*field_types(), "config"] if options_class.run_fields else []:
        parser.add_argument(f"--{name}", action=_RunField, dest="fields", nargs="?", help=argparse.SUPPRESS)
    return parser


class _RunField(argparse.Action):
    """Keeps the words of a run's field for the run's own parser."""

    def __call__(self, _parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        words = [option_string] if value is None else [option_string, value]
        namespace.fields = [*(namespace.fields or []), *words]


def _parser_argument(item: dataclasses.Field, type_hint: Any) -> tuple[str, dict[str, Any]]:
    facts = item.metadata
    if type_hint is bool:
        return option_flag(item.name), {"action": "store_true"}
    kind = type_hint
    while get_origin(kind) not in (None, Literal):  # the items of a list, or what is not None
        kind = get_args(kind)[0]
    settings: dict[str, Any] = {"metavar": facts.get("metavar") or None}
    if get_origin(kind) is Literal:
        settings["choices"] = get_args(kind)
    else:
        settings["type"] = functools.partial(_read_number, kind, facts) if kind in (int, float) else kind
    if facts.get("several"):
        settings |= {"nargs": "+", "action": "extend"}
    is_required = item.default is MISSING and item.default_factory is MISSING
    if facts.get("positional"):
        return item.name, settings | ({} if is_required else {"nargs": "?"})
    return option_flag(item.name), settings | {"required": is_required}


def _read_number(kind: type, facts: Mapping[str, Any], word: str) -> Any:
    try:
        number = kind(word)
    except ValueError:
        whole = "whole " if kind is int else ""
        raise argparse.ArgumentTypeError(f"expected a {whole}number, got {word}") from None
    if range_text := valid_range(number, facts):
        raise argparse.ArgumentTypeError(f"{word} must be {range_text}")
    return number


def _option_help(item: dataclasses.Field, docstring: str) -> str:
    default = item.metadata.get("shown_default") or item.default
    shown = "" if default in (MISSING, None, False, "") else f" (default: {default})"
    return f"{docstring.rstrip('.') if shown else docstring}{shown}".replace("%", "%%")


def option_flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def shown_options(options_class: type[CommandOptions]) -> list[dataclasses.Field]:
    """The fields that are options: first those of the class itself, then those of its bases."""
    visible_fields = [item for item in dataclasses.fields(options_class) if not item.metadata.get("hidden")]
    own_field_names = set(vars(options_class).get("__annotations__", ()))
    return sorted(visible_fields, key=lambda item: item.name not in own_field_names)


def field_docstrings(options_class: type) -> dict[str, str]:
    return {
        item.arg_name: " ".join((item.description or "").split())
        for base in reversed(options_class.__mro__)
        if dataclasses.is_dataclass(base)
        for item in parse_from_object(base).params
    }
