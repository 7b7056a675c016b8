"""Hostile content whose success is visible: it creates a file."""

import ast
import json
import pickle
from pathlib import Path
from typing import Any

import torch


class Mark:
    """A file that exists once a payload has run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pickle(self) -> bytes:
        """Bytes that create the file when they are unpickled."""
        return pickle.dumps(_Touch(str(self.path)))

    def torch(self, path: Path) -> None:
        """A ``torch.save`` file that creates the file when it is loaded with ``weights_only=False``."""
        torch.save({"state_dict": _Touch(str(self.path))}, path)

    @property
    def python(self) -> str:
        """A module that creates the file when it is imported."""
        names = "Config Model Tokenizer Processor sample_loader part_filter generate Evil".split()
        touch = f"open({str(self.path)!r}, 'w').close()"
        classes = [f"class {name}:\n    def __init__(self, *a, **k): {touch}" for name in names]
        return "\n".join([touch, *classes])

    @property
    def template(self) -> str:
        """A Jinja template that creates the file if nothing stops it."""
        return "{{ cycler.__init__.__globals__.os.system('touch " + str(self.path) + "') }}"

    def check(self) -> None:
        assert not self.path.exists(), "a payload was executed"


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def calls_of(source: str, name: str) -> list[ast.Call]:
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call for call in found if isinstance(call.func, ast.Attribute) and call.func.attr == name]
