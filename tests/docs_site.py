"""The module that makes pages of the documentation site; ``docs/`` is no package."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

HOOKS = Path(__file__).resolve().parent.parent / "docs" / "hooks.py"


@cache
def docs_hooks() -> ModuleType:
    """``docs/hooks.py``, imported as mkdocs does it."""
    spec = importlib.util.spec_from_file_location("docs_hooks", HOOKS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
