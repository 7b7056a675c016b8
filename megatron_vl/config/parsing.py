"""Reads a run: its YAML and the dotted options of the command line."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings
from yaml.nodes import CollectionNode, MappingNode, Node

from megatron_vl.config.fields import RunConfigError, TrainConfig, describe_type, field_types, section_names
from megatron_vl.config.removed import REMOVED_FIELDS

PROGRAM_NAME = "python -m megatron_vl.train"
LAYERS_OPTION = "--parallel.layers"
BARE_LIST_PATTERN = re.compile(r"\d+(,\d+)*")
PARSER_ERRORS = (ArgumentError, ValueError, TypeError, OSError)
"""The errors of jsonargparse for a command line that it cannot read."""
PLAIN_YAML_TAGS = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge", "timestamp")
}
"""YAML tags of plain values."""


@functools.cache
def build_parser(help_texts: bool = True) -> ArgumentParser:
    """The command line: ``--config RUN.yaml`` and one dotted option per field.

    Args:
        help_texts: whether a field's docstring is its help. Finding them in the source takes five times as
            long as all the rest, and every rank of a run builds a parser.
    """
    # This is off by default. Without it the docstrings below the fields do not reach --help.
    set_parsing_settings(docstring_parse_attribute_docstrings=help_texts)
    parser = ArgumentParser(
        prog=PROGRAM_NAME,
        usage=f"{PROGRAM_NAME} --config RUN.yaml [--section.field value ...]",
        description="Train a Qwen-VL model. Start it with torchrun, one process per GPU.",
        exit_on_error=False,
        allow_abbrev=False,  # a field added later must not change what a shortened name means
    )
    parser.add_argument("--config", action="config", help="YAML of the run; later options override it.")
    parser.add_class_arguments(TrainConfig)
    return parser


def parse_config(argv: list[str] | None = None) -> TrainConfig:
    """Reads ``--config RUN.yaml`` and ``--section.field value`` overrides.

    Raises:
        RunConfigError: a field is unknown or its value has the wrong type;
            the message says what would be valid.
        SystemExit: ``--help`` was asked for.
    """
    argv = sys.argv[1:] if argv is None else argv
    # ``--print_config`` can print the fields' help too, as comments.
    shows_help = any(word in ("-h", "--help") or word.startswith("--print_config") for word in argv)
    parser = build_parser(shows_help)

    # Each file is checked alone first, because the parser's own errors name neither the file nor the line.
    for config_path in _config_files(argv):
        _check_config_file(parser, config_path)

    try:
        namespace = parser.parse_args(_bracket_layer_lists(argv))
    except PARSER_ERRORS as error:
        raise RunConfigError(_explain_run_error(str(error))[0]) from error

    # The parser accepts a plain value in place of a whole section.
    for section_name in section_names():
        if not isinstance(namespace.get(section_name), Namespace):
            raise RunConfigError(_section_message(section_name))

    # The namespace also has the path of the config file, which is no field of a run.
    config = parser.instantiate_classes(namespace)
    if config.lora.adapter:
        stated = parser.parse_args(_bracket_layer_lists(argv), defaults=False)["lora"]
        object.__setattr__(config.lora, "stated_fields", frozenset(vars(stated)))
    return TrainConfig(**{item.name: getattr(config, item.name) for item in dataclasses.fields(TrainConfig)})


def _bracket_layer_lists(argv: Sequence[str]) -> list[str]:
    """Turns ``--parallel.layers 3,1``, which is how ``split --layers`` is written, into a list ``[3,1]``."""
    arguments: list[str] = []
    for argument in argv:
        name, equals_sign, value = argument.rpartition("=")
        is_layers_option = name == LAYERS_OPTION or arguments[-1:] == [LAYERS_OPTION]
        if is_layers_option and BARE_LIST_PATTERN.fullmatch(value):
            argument = f"{name}{equals_sign}[{value}]"
        arguments.append(argument)
    return arguments


def _config_files(argv: list[str]) -> list[str]:
    """The files given as ``--config``. jsonargparse also takes YAML text in place of a file name."""
    config_paths = []
    for word, next_word in zip(argv, [*argv[1:], ""], strict=False):
        config_path = next_word if word == "--config" else word.removeprefix("--config=")
        is_option = word == "--config" or word.startswith("--config=")
        if is_option and "\n" not in config_path and len(config_path) < 4096 and Path(config_path).is_file():
            config_paths.append(config_path)
    return config_paths


def _check_config_file(parser: ArgumentParser, config_path: str) -> None:
    """Reads one YAML file alone, so that an error message can name the file and the line."""
    line_by_field: dict[str, int] = {}
    try:
        line_by_field = field_lines(Path(config_path), section_names())
        parser.parse_args(["--config", config_path])
    except RunConfigError:
        raise
    except PARSER_ERRORS as error:
        message, field_name = _explain_run_error(str(error))
        # jsonargparse names a section's unknown field with or without the section.
        nested_lines = (
            line_number for full, line_number in line_by_field.items() if full.endswith(f".{field_name}")
        )
        line_number = (
            line_by_field.get(field_name)
            or line_by_field.get(field_name.partition(".")[0])
            or next(nested_lines, None)
        )
        raise RunConfigError(
            f"{config_path}{f', line {line_number}' if line_number else ''}: {message}"
        ) from error


def parse_or_exit(argv: list[str] | None = None) -> TrainConfig:
    """:func:`parse_config` for the entry point. Rank 0 prints an error, and all ranks exit with code 2."""
    try:
        return parse_config(argv)
    except RunConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{PROGRAM_NAME}: {error}\nAll fields: {PROGRAM_NAME} --help", file=sys.stderr)
        raise SystemExit(2) from error


# --- The YAML before its values are read --------------------------------------------------------------------


def field_lines(config_path: Path, nested_sections: Collection[str]) -> dict[str, int]:
    """The fields that the file sets: dotted name -> line (counted from 1).

    Args:
        nested_sections: names of the fields that are sections.

    Raises:
        RunConfigError: the YAML is broken, is not a mapping of fields, or sets a field twice.
        OSError: the file cannot be read.
    """
    line_by_field: dict[str, int] = {}
    for field_name, line_number, value_node in _mapping_entries(_compose_yaml(config_path)):
        _add_field_line(config_path, line_by_field, field_name, line_number)
        if field_name not in nested_sections:
            continue
        if not isinstance(value_node, MappingNode):
            raise RunConfigError(
                f"{config_path}, line {line_number}: {field_name!r} is a section; give fields in it, or leave"
                " it out"
            )
        for nested_field, field_line, _ in _mapping_entries(value_node):
            _add_field_line(config_path, line_by_field, f"{field_name}.{nested_field}", field_line)
    return line_by_field


def yaml_error_message(file_path: object, yaml_text: str, error: yaml.MarkedYAMLError) -> str:
    """One line that says where the YAML ``yaml_text`` of a file is broken. It explains tabs."""
    error_mark = error.problem_mark or error.context_mark
    position_text = f", line {error_mark.line + 1}, column {error_mark.column + 1}" if error_mark else ""
    context_text = ""
    if error.context and error.context_mark:
        context_text = f" ({error.context}, from line {error.context_mark.line + 1})"
    line = yaml_text.splitlines()[error_mark.line : error_mark.line + 1] if error_mark else []
    tab_advice = "; indent with spaces instead of tabs" if line and "\t" in line[0] else ""
    return f"{file_path}{position_text}: broken YAML: {error.problem}{context_text}{tab_advice}"


def _compose_yaml(config_path: Path) -> MappingNode:
    """The file's node tree, without constructing any values."""
    yaml_text = ""
    try:
        yaml_text = config_path.read_text(encoding="utf-8")
        root_node = yaml.compose(yaml_text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise RunConfigError(
            f"{config_path}: not UTF-8 text: {error.reason}, at byte {error.start}"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise RunConfigError(yaml_error_message(config_path, yaml_text, error)) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise RunConfigError(f"{config_path}: broken YAML: {' '.join(str(error).split())}") from error

    if not isinstance(root_node, MappingNode):
        raise RunConfigError(f"{config_path}: the file has no fields; expected lines such as `steps: 100`")
    _check_yaml_nodes(config_path, root_node, set(), set())
    return root_node


def _check_yaml_nodes(config_path: Path, node: Node, ancestor_ids: set[int], checked_ids: set[int]) -> None:
    """Refuses tags, and aliases of a node that contains them, which jsonargparse would follow without end.

    Args:
        ancestor_ids: ids of the nodes that contain this one.
        checked_ids: ids of the nodes that were already checked.
    """
    position_text = f"{config_path}, line {node.start_mark.line + 1}"
    if id(node) in ancestor_ids:
        raise RunConfigError(f"{position_text}: broken YAML: an alias inside the value that it stands for")
    if node.tag not in PLAIN_YAML_TAGS:
        raise RunConfigError(f"{position_text}: YAML tags such as {node.tag!r} are not supported")
    if id(node) in checked_ids or not isinstance(node, CollectionNode):
        return
    checked_ids.add(id(node))
    for child_item in node.value:
        for child_node in child_item if isinstance(child_item, tuple) else (child_item,):
            _check_yaml_nodes(config_path, child_node, ancestor_ids | {id(node)}, checked_ids)


def _mapping_entries(mapping: MappingNode) -> Iterator[tuple[str, int, Node]]:
    """(key, line, value) of each entry in order. Entries from a merge (``<<``) are left out."""
    for key, value in mapping.value:
        if key.tag != "tag:yaml.org,2002:merge":
            yield str(key.value), key.start_mark.line + 1, value


def _add_field_line(
    config_path: Path, line_by_field: dict[str, int], field_name: str, line_number: int
) -> None:
    if field_name in line_by_field:  # YAML readers silently take the last one
        raise RunConfigError(
            f"{config_path}, line {line_number}: field {field_name!r} is in line {line_by_field[field_name]}"
            " already"
        )
    line_by_field[field_name] = line_number


# --- Messages -----------------------------------------------------------------------------------------------


def explain_parser_error(
    message: str, types_by_name: Mapping[str, Any], options_by_name: Mapping[str, str]
) -> tuple[str, str]:
    """(jsonargparse's message in one line, name of the option or field); an unknown name is empty.

    Args:
        types_by_name: name -> type of the options or fields.
        options_by_name: name -> option as it is written on the command line; fields of a run are not in it.
    """
    missing_names = message.partition("the following arguments are required: ")[2]
    if missing_names:
        return (
            f"{', '.join(options_by_name[field_name] for field_name in missing_names.split(', '))} must be"
            " given",
            "",
        )

    message = " ".join(message.split())
    type_error_match = re.match(r'Parser key "([\w.]+)": ?(.*)', message)
    if not type_error_match:
        return message, ""
    field_name, error_detail = type_error_match.groups()
    if field_name not in types_by_name:
        return f"--{field_name}: {error_detail}", field_name
    value_match = re.search(r".*(?:Got|Given) value: (.*)", error_detail)
    given_text = f", got {value_match[1]}" if value_match else f"; {error_detail}"
    expected_text = f"{describe_type(types_by_name[field_name])}{given_text}"
    if field_name in options_by_name:
        return f"{options_by_name[field_name]}: expected {expected_text}", field_name
    return f"field {field_name!r}: expected {expected_text}", field_name


def _explain_run_error(message: str) -> tuple[str, str]:
    """:func:`explain_parser_error` for the fields of a run. It suggests names for an unknown field."""
    unknown_match = re.search(
        r"unrecognized arguments: --([\w.]+)|'([\w.]+)' is not accepted|not accept option '(\w+)'", message
    )
    if unknown_match:
        field_name = next(group for group in unknown_match.groups() if group)
        section_match = re.search(
            rf"Group '([\w.]+)' does not accept option '{re.escape(field_name)}'", message
        )
        field_name = f"{section_match[1]}.{field_name}" if section_match else field_name
        if field_name in REMOVED_FIELDS:
            return f"field {field_name!r} was removed: {REMOVED_FIELDS[field_name]}", field_name
        return f"field {field_name!r} is unknown; {_suggest_fields(field_name)}", field_name

    positional_match = re.match(r"unrecognized arguments: ([^-\s]\S*\.ya?ml)$", message)
    if positional_match:
        return (
            f"unrecognized argument: {positional_match[1]}; did you mean --config {positional_match[1]}?",
            "",
        )

    missing_value_match = re.match(r"argument --([\w.]+): expected one argument", message)
    if missing_value_match:
        advice = f"as in --{missing_value_match[1]} VALUE (switches too: true or false)"
        return f"--{missing_value_match[1]} needs a value after it, {advice}", missing_value_match[1]

    explanation, field_name = explain_parser_error(message, field_types(), {})
    return (_section_message(field_name) if field_name in section_names() else explanation), field_name


def _suggest_fields(unknown_name: str) -> str:
    """A text that suggests known fields in place of an unknown one."""
    known_fields = field_types()
    field_by_leaf = {field.split(".")[-1]: field for field in known_fields}
    near_names = difflib.get_close_matches(unknown_name, [*known_fields, "config"], 3)
    near_names = near_names or [
        field_by_leaf[close]
        for close in difflib.get_close_matches(unknown_name.split(".")[-1], field_by_leaf, 3)
    ]
    if near_names:
        return f"did you mean {', '.join(near_names)}?"
    section_fields = [field for field in known_fields if field.startswith(unknown_name.split(".")[0] + ".")]
    return f"valid: {', '.join(section_fields or known_fields)}"


def _section_message(section_name: str) -> str:
    return f"field {section_name!r} is a section; give its fields, as in --{section_name}.FIELD value"
