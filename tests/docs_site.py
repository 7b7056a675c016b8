"""The module that makes pages of the documentation site."""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config import load_config
from mkdocs.structure.files import File
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent


def docs_hooks() -> ModuleType:
    return import_module("docs.hooks")


def site_page(address: str) -> str:
    """The Markdown of a page below ``docs/`` as the site has it."""
    file = File(address, "docs", "site", use_directory_urls=False)
    page: Any = Page(None, file, load_config(str(ROOT / "mkdocs.yml")))
    return docs_hooks().on_page_markdown((ROOT / "docs" / address).read_text(), page=page)
