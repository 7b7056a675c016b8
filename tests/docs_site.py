"""The module that makes pages of the documentation site; ``docs/`` is no package."""

from __future__ import annotations

from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


@cache
def docs_hooks() -> ModuleType:
    """``docs/hooks.py``, imported as mkdocs does it."""
    spec = spec_from_file_location("docs_hooks", Path(__file__).resolve().parent.parent / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
