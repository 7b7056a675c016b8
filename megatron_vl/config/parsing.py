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

from megatron_vl.config.fields import RunConfigError, TrainConfig, field_types, in_words, sections

PROGRAM = "python -m megatron_vl.train"
LAYERS_OPTION = "--parallel.layers"
BARE_LIST = re.compile(r"\d+(,\d+)*")
PARSER_ERRORS = (ArgumentError, ValueError, TypeError, OSError)
"""What jsonargparse raises for a line that it cannot read."""
PLAIN = {
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
        prog=PROGRAM,
        usage=f"{PROGRAM} --config RUN.yaml [--section.field value ...]",
        description="Train a Qwen-VL model. Start it with torchrun, one process per GPU.",
        exit_on_error=False,
        allow_abbrev=False,  # a field added later must not change what a shortened name means
    )
    parser.add_argument("--config", action="config", help="YAML of the run; later options override it.")
    parser.add_class_arguments(TrainConfig)
    return parser


def _shows_help(argv: Sequence[str]) -> bool:
    """Whether the texts of the fields are printed: also ``--print_config`` can have them as comments."""
    return any(word in ("-h", "--help") or word.startswith("--print_config") for word in argv)


def parse_config(argv: list[str] | None = None) -> TrainConfig:
    """Reads ``--config RUN.yaml`` and ``--section.field value`` overrides.

    Raises:
        RunConfigError: a field is unknown or its value has the wrong type;
            the message says what would be valid.
        SystemExit: ``--help`` was asked for.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser(_shows_help(argv))
    for path in _config_files(argv):
        _check_file(parser, path)

    try:
        namespace = parser.parse_args(_with_brackets(argv))
    except PARSER_ERRORS as error:
        raise RunConfigError(_explain(str(error))[0]) from error
    for section in sections():
        if not isinstance(namespace.get(section), Namespace):
            raise RunConfigError(_is_section(section))

    config = parser.instantiate_classes(namespace)
    return TrainConfig(**{item.name: getattr(config, item.name) for item in dataclasses.fields(TrainConfig)})


def _with_brackets(argv: Sequence[str]) -> list[str]:
    """``--parallel.layers 3,1`` as ``--parallel.layers [3,1]``, as ``split --layers`` is written too."""
    words: list[str] = []
    for word in argv:
        name, equals, value = word.rpartition("=")
        is_split = name == LAYERS_OPTION or words[-1:] == [LAYERS_OPTION]
        words.append(f"{name}{equals}[{value}]" if is_split and BARE_LIST.fullmatch(value) else word)
    return words


def _config_files(argv: list[str]) -> list[str]:
    """The files given as ``--config``. jsonargparse also takes YAML text in place of a file name."""
    given = [after for word, after in zip(argv, argv[1:], strict=False) if word == "--config"]
    given += [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
    return [path for path in given if "\n" not in path and len(path) < 4096 and Path(path).is_file()]


def _check_file(parser: ArgumentParser, path: str) -> None:
    """Reads one YAML file alone, so that an error message can name the file and the line."""
    lines: dict[str, int] = {}
    try:
        lines = field_lines(Path(path), sections())
        parser.parse_args(["--config", path])
    except RunConfigError:
        raise
    except PARSER_ERRORS as error:
        message, name = _explain(str(error))
        # jsonargparse names a section's unknown field with or without the section.
        inner = (line for full, line in lines.items() if full.endswith(f".{name}"))
        line = lines.get(name) or lines.get(name.partition(".")[0]) or next(inner, None)
        raise RunConfigError(f"{path}{f', line {line}' if line else ''}: {message}") from error


def parse(argv: list[str] | None = None) -> TrainConfig:
    """:func:`parse_config` for the entry point:
    on an error, rank 0 prints it and every rank exits with code 2."""
    try:
        return parse_config(argv)
    except RunConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{PROGRAM}: {error}\nAll fields: {PROGRAM} --help", file=sys.stderr)
        raise SystemExit(2) from error


# --- The YAML before its values are read --------------------------------------------------------------------


def field_lines(path: Path, sections: Collection[str]) -> dict[str, int]:
    """The fields that the file sets: dotted name -> line (counted from 1).

    Args:
        sections: fields that hold fields.

    Raises:
        RunConfigError: the YAML is broken, is not a mapping of fields, or sets a field twice.
        OSError: the file cannot be read.
    """
    lines: dict[str, int] = {}
    for name, line, value in _entries(_composed(path)):
        _add(path, lines, name, line)
        if name not in sections:
            continue
        if not isinstance(value, MappingNode):
            raise RunConfigError(
                f"{path}, line {line}: {name!r} is a section; give fields in it, or leave it out"
            )
        for field, field_line, _ in _entries(value):
            _add(path, lines, f"{name}.{field}", field_line)
    return lines


def yaml_fault(path: object, text: str, error: yaml.MarkedYAMLError) -> str:
    """One line that says where the YAML ``text`` of a file is broken, and for tabs what to do."""
    mark = error.problem_mark or error.context_mark
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    context = (
        f" ({error.context}, from line {error.context_mark.line + 1})"
        if error.context and error.context_mark
        else ""
    )
    line = text.splitlines()[mark.line : mark.line + 1] if mark else []
    tab = "; indent with spaces instead of tabs" if line and "\t" in line[0] else ""
    return f"{path}{where}: broken YAML: {error.problem}{context}{tab}"


def _composed(path: Path) -> MappingNode:
    """The file's node tree, without constructing any values."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise RunConfigError(f"{path}: not UTF-8 text: {error.reason}, at byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        raise RunConfigError(yaml_fault(path, text, error)) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise RunConfigError(f"{path}: broken YAML: {' '.join(str(error).split())}") from error

    if not isinstance(root, MappingNode):
        raise RunConfigError(f"{path}: the file has no fields; expected lines such as `steps: 100`")
    _check_nodes(path, root, set(), set())
    return root


def _check_nodes(path: Path, node: Node, above: set[int], seen: set[int]) -> None:
    """Refuses tags, and aliases of a node that contains them, which jsonargparse would follow without end.

    Args:
        above: ids of the nodes that contain this one.
        seen: ids of the nodes that were already checked.
    """
    where = f"{path}, line {node.start_mark.line + 1}"
    if id(node) in above:
        raise RunConfigError(f"{where}: broken YAML: an alias inside the value that it stands for")
    if node.tag not in PLAIN:
        raise RunConfigError(f"{where}: YAML tags such as {node.tag!r} are not supported")
    if id(node) in seen or not isinstance(node, CollectionNode):
        return
    seen.add(id(node))
    for item in node.value:
        for inner in item if isinstance(item, tuple) else (item,):
            _check_nodes(path, inner, above | {id(node)}, seen)


def _entries(mapping: MappingNode) -> Iterator[tuple[str, int, Node]]:
    """(key, line, value) of each entry in order. What a merge (``<<``) adds has no line of its own."""
    for key, value in mapping.value:
        if key.tag != "tag:yaml.org,2002:merge":
            yield str(key.value), key.start_mark.line + 1, value


def _add(path: Path, lines: dict[str, int], name: str, line: int) -> None:
    if name in lines:  # YAML readers silently take the last one
        raise RunConfigError(f"{path}, line {line}: field {name!r} is in line {lines[name]} already")
    lines[name] = line


# --- Messages -----------------------------------------------------------------------------------------------


def explain(message: str, types: Mapping[str, Any], spelled: Mapping[str, str]) -> tuple[str, str]:
    """jsonargparse's message in one line, and the name of the option or field; empty if it is not known.

    Args:
        types: name -> type of the options or fields.
        spelled: name -> option as it is written on the command line; without fields of a run.
    """
    missing = message.partition("the following arguments are required: ")[2]
    if missing:
        return f"{', '.join(spelled[name] for name in missing.split(', '))} must be given", ""

    message = " ".join(message.split())
    ill_typed = re.match(r'Parser key "([\w.]+)": ?(.*)', message)
    if not ill_typed:
        return message, ""
    name, rest = ill_typed.groups()
    if name not in types:
        return f"--{name}: {rest}", name
    value = re.search(r".*(?:Got|Given) value: (.*)", rest)
    given = f", got {value[1]}" if value else f"; {rest}"
    expected = f"{in_words(types[name])}{given}"
    if name in spelled:
        return f"{spelled[name]}: expected {expected}", name
    return f"field {name!r}: expected {expected}", name


def _explain(message: str) -> tuple[str, str]:
    """:func:`explain` for the fields of a run. For an unknown field it suggests the nearest names."""
    unknown = re.search(
        r"unrecognized arguments: --([\w.]+)|'([\w.]+)' is not accepted|not accept option '(\w+)'", message
    )
    if unknown:
        name = next(group for group in unknown.groups() if group)
        inside = re.search(rf"Group '([\w.]+)' does not accept option '{re.escape(name)}'", message)
        name = f"{inside[1]}.{name}" if inside else name
        return f"field {name!r} is unknown; {_nearest(name)}", name

    positional = re.match(r"unrecognized arguments: ([^-\s]\S*\.ya?ml)$", message)
    if positional:
        return f"unrecognized argument: {positional[1]}; did you mean --config {positional[1]}?", ""

    empty = re.match(r"argument --([\w.]+): expected one argument", message)
    if empty:
        advice = f"as in --{empty[1]} VALUE (switches too: true or false)"
        return f"--{empty[1]} needs a value after it, {advice}", empty[1]

    explained, name = explain(message, field_types(), {})
    return (_is_section(name) if name in sections() else explained), name


def _nearest(name: str) -> str:
    """What an unknown field may have meant."""
    known = field_types()
    leaf = {field.split(".")[-1]: field for field in known}
    near = difflib.get_close_matches(name, [*known, "config"], 3)
    near = near or [leaf[close] for close in difflib.get_close_matches(name.split(".")[-1], leaf, 3)]
    section = [field for field in known if field.startswith(name.split(".")[0] + ".")]
    return f"did you mean {', '.join(near)}?" if near else f"valid: {', '.join(section or known)}"


def _is_section(name: str) -> str:
    return f"field {name!r} is a section; give its fields, as in --{name}.FIELD value"
