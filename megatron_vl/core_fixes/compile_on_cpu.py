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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any


class _ModuleFinder(importlib.abc.MetaPathFinder):
    """Finds one module in the usual way, and has it executed within a context."""

    def __init__(self, module_name: str, context: Callable[[], AbstractContextManager[None]]) -> None:
        self.module_name, self.context = module_name, context

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module_name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_in_context(module: ModuleType) -> None:
                with self.context():
                    execute(module)

            spec.loader.exec_module = execute_in_context  # type: ignore[method-assign]
        return spec


@contextmanager
def _without_compiling() -> Iterator[None]:
    import torch

    if torch.cuda.is_available():
        yield
        return
    torch_compile, torch.compile = torch.compile, _return_unchanged  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = torch_compile
    # Parts of core that are imported later get the wrapper from this module.
    sys.modules["megatron.core.jit"].disable_jit_fuser()


@contextmanager
def _without_sklearn() -> Iterator[None]:
    """For this one module, scikit-learn is not installed. Other modules find it."""
    import transformers.utils as utils

    is_available, utils.is_sklearn_available = utils.is_sklearn_available, lambda: False
    try:
        yield
    finally:
        utils.is_sklearn_available = is_available


def _return_unchanged(plain_function: Callable[..., Any] | None = None, **compile_options: Any) -> Any:
    """Replaces ``torch.compile``: returns the function unchanged, or a decorator that does so."""
    return plain_function if plain_function is not None else _return_unchanged


CONTEXTS = {
    "megatron.core": _without_compiling,
    "transformers.generation.candidate_generator": _without_sklearn,
}
"""The context in which each module is imported."""


def install_finders() -> None:
    """Installs the finders. Call it before the modules are imported; afterwards, it does nothing."""
    watched = {finder.module_name for finder in sys.meta_path if isinstance(finder, _ModuleFinder)}
    for name, context in CONTEXTS.items():
        if name not in sys.modules and name not in watched:
            sys.meta_path.insert(0, _ModuleFinder(name, context))
