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

CORE_MODULE = "megatron.core"
SPECULATIVE_MODULE = "transformers.generation.candidate_generator"


class _OneModuleFinder(importlib.abc.MetaPathFinder):
    """Finds one module in the usual way, and lets a loader of ours load it."""

    def __init__(self, module_name: str, loader_class: type[_DelegatingLoader]) -> None:
        self.module_name = module_name
        self.loader_class = loader_class

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module_name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = self.loader_class(spec.loader)
        return spec


class _DelegatingLoader(importlib.abc.Loader):
    """Delegates to the loader that it wraps."""

    def __init__(self, wrapped_loader: importlib.abc.Loader) -> None:
        self.wrapped_loader = wrapped_loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.wrapped_loader.create_module(spec)


class _UncompiledCoreLoader(_DelegatingLoader):
    def exec_module(self, module: ModuleType) -> None:
        import torch

        if torch.cuda.is_available():
            self.wrapped_loader.exec_module(module)
            return
        torch_compile, torch.compile = torch.compile, _return_unchanged  # type: ignore[assignment]
        try:
            self.wrapped_loader.exec_module(module)
        finally:
            torch.compile = torch_compile
        # Parts of core that are imported later get the wrapper from this module.
        sys.modules[f"{CORE_MODULE}.jit"].disable_jit_fuser()


class _NoSklearnLoader(_DelegatingLoader):
    """For this one module, scikit-learn is not installed. Other modules find it."""

    def exec_module(self, module: ModuleType) -> None:
        import transformers.utils as utils

        is_available, utils.is_sklearn_available = utils.is_sklearn_available, lambda: False
        try:
            self.wrapped_loader.exec_module(module)
        finally:
            utils.is_sklearn_available = is_available


def _return_unchanged(plain_function: Callable[..., Any] | None = None, **compile_options: Any) -> Any:
    """Replaces ``torch.compile``: returns the function unchanged, or a decorator that does so."""
    return plain_function if plain_function is not None else _return_unchanged


def install_finders() -> None:
    """Installs the finders. Call it before the modules are imported; afterwards, it does nothing."""
    watched_modules = {finder.module_name for finder in sys.meta_path if isinstance(finder, _OneModuleFinder)}
    for module, loader_class in (
        (CORE_MODULE, _UncompiledCoreLoader),
        (SPECULATIVE_MODULE, _NoSklearnLoader),
    ):
        if module not in sys.modules and module not in watched_modules:
            sys.meta_path.insert(0, _OneModuleFinder(module, loader_class))
