"""Makes the import of Megatron-core (0.19.2) faster: without ``torch.compile`` on CPU, and without wandb.

Core wraps some forty small functions in ``torch.compile`` while it is imported. To make the wrappers, torch
imports inductor, which takes two of the six seconds of processor time that each rank needs to start. A CPU
run gains nothing from the compiled functions. If Weights & Biases is installed, core also imports it for
timers that are not used here. That takes half a second. A run that logs to Weights & Biases imports it later.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

CORE = "megatron.core"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds core in the usual way, and lets :class:`_Loader` load it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != CORE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with without("wandb"):
            self._exec_module(module)

    def _exec_module(self, module: ModuleType) -> None:
        import torch

        if torch.cuda.is_available():
            self.loader.exec_module(module)
            return
        compile_, torch.compile = torch.compile, _as_it_is  # type: ignore[assignment]
        try:
            self.loader.exec_module(module)
        finally:
            torch.compile = compile_
        # Parts of core that are imported later get the wrapper from this module.
        sys.modules[f"{CORE}.jit"].disable_jit_fuser()


@contextlib.contextmanager
def without(package: str) -> Iterator[None]:
    """A context in which imports of a package fail as if it were not installed.

    If the package was imported before, the context does nothing.
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def _as_it_is(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replaces ``torch.compile``: returns the function unchanged, or a decorator that does so."""
    return function if function is not None else _as_it_is


def install() -> None:
    """Installs the finder. Call it before core is imported; afterwards, it does nothing."""
    if CORE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
