"""Makes imports faster: Megatron-core (0.19.2) without ``torch.compile`` on CPU, transformers without
scikit-learn.

Core wraps some forty small functions in ``torch.compile`` while it is imported. To make the wrappers, torch
imports inductor, which takes two of the six seconds of processor time that each rank needs to start. A CPU
run gains nothing from the compiled functions.

If scikit-learn is installed, transformers imports it, with SciPy and pandas, for speculative decoding. That
takes two seconds of every process that reads a tokenizer. Nothing here decodes speculatively.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

CORE = "megatron.core"
SPECULATIVE = "transformers.generation.candidate_generator"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module in the usual way, and lets a loader of ours load it."""

    def __init__(self, module: str, loader: type[_Loader]) -> None:
        self.module = module
        self.loader = loader

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = self.loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Does as the loader that it is given."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)


class _CoreLoader(_Loader):
    def exec_module(self, module: ModuleType) -> None:
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


class _SpeculativeLoader(_Loader):
    """For this one module, scikit-learn is not installed. Other modules find it."""

    def exec_module(self, module: ModuleType) -> None:
        import transformers.utils as utils

        available, utils.is_sklearn_available = utils.is_sklearn_available, lambda: False
        try:
            self.loader.exec_module(module)
        finally:
            utils.is_sklearn_available = available


def _as_it_is(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replaces ``torch.compile``: returns the function unchanged, or a decorator that does so."""
    return function if function is not None else _as_it_is


def install() -> None:
    """Installs the finders. Call it before the modules are imported; afterwards, it does nothing."""
    found = {finder.module for finder in sys.meta_path if isinstance(finder, _Finder)}
    for module, loader in ((CORE, _CoreLoader), (SPECULATIVE, _SpeculativeLoader)):
        if module not in sys.modules and module not in found:
            sys.meta_path.insert(0, _Finder(module, loader))
