"""Reads the YAML of a run: the value of each field, and the line where it stands."""

from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode

from megatron_vl.config.fields import RunConfigError


def read_run_file(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The values of a run's YAML, as nested as they are in it, and dotted name -> line (counted from 1)."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if not isinstance(root, MappingNode):
            raise RunConfigError(f"{path}: the file has no fields; expected lines such as `steps: 100`")
        lines = _field_lines(path, root)
        return loader.construct_document(root), lines
    except UnicodeDecodeError as error:
        raise RunConfigError(f"{path}: not UTF-8 text: {error.reason}, at byte {error.start}") from error
    except OSError as error:
        raise RunConfigError(f"--config {path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        raise RunConfigError(yaml_error_message(path, text, error)) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise RunConfigError(f"{path}: broken YAML: {' '.join(str(error).split())}") from error


def _field_lines(path: Path, mapping: MappingNode, prefix: str = "") -> dict[str, int]:
    lines: dict[str, int] = {}
    for key, value in mapping.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in lines:  # YAML readers silently take the last one
            raise RunConfigError(f"{path}, line {line}: field {name!r} is in line {lines[name]} already")
        lines[name] = line
        if isinstance(value, MappingNode) and not prefix:
            lines |= _field_lines(path, value, f"{name}.")
    return lines


def yaml_error_message(file_path: object, yaml_text: str, error: yaml.MarkedYAMLError) -> str:
    """One line that says where the YAML ``yaml_text`` of a file is broken. It explains tabs."""
    mark = error.problem_mark or error.context_mark
    position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    context = f" ({error.context}, from line {error.context_mark.line + 1})" if error.context_mark else ""
    line = yaml_text.splitlines()[mark.line : mark.line + 1] if mark else []
    tab_advice = "; indent with spaces instead of tabs" if line and "\t" in line[0] else ""
    return f"{file_path}{position}: broken YAML: {error.problem}{context}{tab_advice}"
