"""Reads a run: its YAML and the dotted options of the command line.

jsonargparse makes the help and reads values by the types of the fields. Names are looked up here, and a value
that has the wrong type is found by reading each value on its own, so that messages name the field and, in a
file, its line.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vl.config.fields import RunConfigError, TrainConfig, describe_type, field_types
from megatron_vl.config.removed import explain_unknown
from megatron_vl.config.run_file import read_run_file

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

PROGRAM_NAME = "python -m megatron_vl.train"


type GivenValue = tuple[str, Any, str]
"""Dotted name, value before it is read by its type, and its place: file, line and a colon, or nothing."""


@functools.cache
def build_parser(help_texts: bool = True) -> ArgumentParser:
    """The command line: ``--config RUN.yaml`` and one dotted option per field.

    Args:
        help_texts: whether a field's docstring is its help. Finding them in the source takes five times as
            long as all the rest, and every rank of a run builds a parser.
    """
    # Imported late, because commands without fields of a run start without it.
    from jsonargparse import ArgumentParser, set_parsing_settings

    # This is off by default. Without it the docstrings below the fields do not reach --help.
    set_parsing_settings(docstring_parse_attribute_docstrings=help_texts)
    parser = ArgumentParser(
        prog=PROGRAM_NAME,
        usage=f"{PROGRAM_NAME} --config RUN.yaml [--section.field value ...]",
        description="Train a Qwen-VL model. Start it with torchrun, one process per GPU.",
        exit_on_error=False,
        allow_abbrev=False,  # a field added later must not change what a shortened name means
    )
    parser.add_argument("--config", help="YAML of the run; later options override it.")
    parser.add_class_arguments(TrainConfig)
    return parser


def parse_config(argv: Sequence[str] | None = None) -> TrainConfig:
    """Reads ``--config RUN.yaml`` and ``--section.field value`` overrides.

    Raises:
        RunConfigError: a field is unknown or its value has the wrong type;
            the message says what would be valid.
        SystemExit: ``--help`` was asked for.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        print(build_parser().format_help(), end="")
        raise SystemExit(0)
    parser = build_parser(help_texts=False)
    # What a later word overrides is read too: the file is wrong all the same.
    values = {name: _read_value(parser, name, value, place) for name, value, place in _given_values(argv)}

    # Each value has its type now, so the sections are made here: the parser would take seven times as long.
    given = _nested(values)
    for section in dataclasses.fields(TrainConfig):
        if section.name in given and dataclasses.is_dataclass(make_section := section.default_factory):
            given[section.name] = make_section(**given[section.name])
    config = TrainConfig(**given)
    if not (config.steps or config.epochs) and (zero := {"steps", "epochs"} & values.keys()):
        raise RunConfigError(f"{min(zero)} 0 trains nothing; leave it out for one pass over the data")
    if config.lora.adapter:
        stated = frozenset(name.removeprefix("lora.") for name in values if name.startswith("lora."))
        object.__setattr__(config.lora, "stated_fields", stated)
    return config


def stated_fields(argv: Sequence[str]) -> set[str]:
    """Dotted names of the fields that the words of a run give, here or in its file."""
    return {name for name, _, _ in _given_values(argv)}


def parse_or_exit(argv: list[str] | None = None) -> TrainConfig:
    """:func:`parse_config` for the entry point. Rank 0 prints an error, and all ranks exit with code 2."""
    try:
        return parse_config(argv)
    except RunConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{PROGRAM_NAME}: {error}\nAll fields: {PROGRAM_NAME} --help", file=sys.stderr)
        raise SystemExit(2) from error


def _given_values(argv: Sequence[str]) -> Iterator[GivenValue]:
    words = iter(argv)
    for word in words:
        flag, equals_sign, value = word.partition("=")
        name = flag.removeprefix("--")
        _check_name(name if flag.startswith("--") else word)
        if not equals_sign and (value := next(words, "--")).startswith("--"):
            raise RunConfigError(f"--{name} needs a value after it (switches too: true or false)")
        if name == "config":
            yield from _file_values(Path(value))
        else:
            yield name, value, ""


def _file_values(path: Path) -> Iterator[GivenValue]:
    values, lines = read_run_file(path)
    for name, value in values.items():
        is_section = name not in field_types() and isinstance(value, dict)
        leaves = {f"{name}.{leaf}": each for leaf, each in value.items()} if is_section else {name: value}
        for field, each in leaves.items():
            # What YAML merges from elsewhere has the line of its section.
            place = f"{path}, line {lines.get(field, lines.get(str(name), 1))}: "
            _check_name(str(field), place)
            yield field, each, place


def _read_value(parser: ArgumentParser, name: str, value: Any, place: str) -> Any:
    """The value in its type, a list also from ``a,b``. Raises RunConfigError if it has another type."""
    for form in [value, value.split(",")] if isinstance(value, str) and value else [value]:
        try:
            return parser.parse_object(_nested({name: form}), defaults=False)[name]
        except (ArgumentError, ValueError, TypeError, RecursionError):
            continue
    raise RunConfigError(f"{place}field {name!r}: expected {describe_type(field_types()[name])}, got {value}")


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in values.items():
        section, _, leaf = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[leaf] = value
    return nested


def _check_name(name: str, place: str = "") -> None:
    fields = [*field_types(), "config"]
    if name not in fields:
        raise RunConfigError(f"{place}{explain_unknown(name, fields)}")


def run_fields_help() -> str:
    """What ``--help`` says of the fields of a run."""
    return "  --config" + build_parser().format_help().partition("\n  --config")[2]
