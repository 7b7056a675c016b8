"""The module that makes pages of the documentation site; ``docs/`` is no package."""

from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config import load_config
from mkdocs.structure.files import File
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent


@cache
def docs_hooks() -> ModuleType:
    """``docs/hooks.py``, imported as mkdocs does it."""
    spec = spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def site_page(address: str) -> str:
    """The Markdown of a page below ``docs/`` as the site has it."""
    file = File(address, "docs", "site", use_directory_urls=False)
    page: Any = Page(None, file, load_config(str(ROOT / "mkdocs.yml")))
    return docs_hooks().on_page_markdown((ROOT / "docs" / address).read_text(), page=page)
