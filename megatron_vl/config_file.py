"""The YAML of a run before its values are read:
the line of each field, and files that are not such a YAML."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import yaml
from yaml.nodes import CollectionNode, MappingNode, Node

from megatron_vl.errors import UserError

PLAIN = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge", "timestamp")
}


class ConfigFileError(UserError, ValueError):
    """A file that does not hold fields of a run. The message names the file and, if known, the line."""


def field_lines(path: Path, sections: Collection[str]) -> dict[str, int]:
    """The fields that the file sets: dotted name -> line (counted from 1).

    Args:
        sections: fields that hold fields.

    Raises:
        ConfigFileError: the YAML is broken, is not a mapping of fields, or sets a field twice.
        OSError: the file cannot be read.
    """
    lines: dict[str, int] = {}
    for name, line, value in _entries(_composed(path)):
        _add(path, lines, name, line)
        if name not in sections:
            continue
        if not isinstance(value, MappingNode):
            raise ConfigFileError(
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
        raise ConfigFileError(f"{path}: not UTF-8 text: {error.reason}, at byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        raise ConfigFileError(yaml_fault(path, text, error)) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigFileError(f"{path}: broken YAML: {' '.join(str(error).split())}") from error

    if not isinstance(root, MappingNode):
        raise ConfigFileError(f"{path}: the file has no fields; expected lines such as `steps: 100`")
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
        raise ConfigFileError(f"{where}: broken YAML: an alias inside the value that it stands for")
    if node.tag not in PLAIN:
        raise ConfigFileError(f"{where}: YAML tags such as {node.tag!r} are not supported")
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
        raise ConfigFileError(f"{path}, line {line}: field {name!r} is in line {lines[name]} already")
    lines[name] = line
