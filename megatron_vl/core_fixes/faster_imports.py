"""Makes imports faster: what torch, Megatron-core (0.19.2) and transformers import and a run does not use.

* Core wraps some forty small functions in ``torch.compile`` while it is imported. To make the wrappers, torch
  imports inductor: two of the six seconds of processor time that each rank needs to start. Here a function is
  compiled when it is first called, and on CPU, which gains nothing from it, never.
* Core's timers import wandb and TensorBoard for functions that are not called here: 0.7 s.
* transformers 5.17 looks at every file of every installed package, to learn which package has which module:
  0.9 s, and far more on a network's disk. Here it learns this of the packages that it asks for.
* transformers reads the files of its 400 models twice to learn their names, 0.4 s each time; here once.
* If scikit-learn is installed, transformers imports it, with SciPy and pandas, for speculative decoding: two
  seconds of every process that reads a tokenizer. Nothing here decodes speculatively.
* FlashAttention-4 compiles its kernels in every process by default. This turns on its cache, in a folder of
  this user on this machine, where no one else can write.
"""

import fcntl
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
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
def _compiling_later() -> Iterator[None]:
    import torch

    # Parts of core that are imported later find what they compile with in core's module ``jit``.
    torch_compile, torch.compile = torch.compile, _compile_at_first_call  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = torch_compile


def _compile_at_first_call(plain_function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replaces ``torch.compile``: a function that compiles itself when it is first called, or a decorator.
    Without a GPU, the function stays as it is."""
    if plain_function is None:
        return functools.partial(_compile_at_first_call, **options)
    import torch

    if not torch.cuda.is_available():
        return plain_function
    compiled_function = functools.cache(lambda: torch.compile(plain_function, **options))

    @functools.wraps(plain_function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a function that calls this one compiles both
            return plain_function(*args, **kwargs)
        return compiled_function()(*args, **kwargs)

    return call


@contextmanager
def _without_packages(*names: str) -> Iterator[None]:
    """For this one module, these modules are not installed. Other modules find them."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


class _PackagesByModule(dict[str, list[str]]):
    """What ``importlib.metadata.packages_distributions()`` returns, of the modules that are asked for."""

    def get(self, name: str, default: Any = None) -> Any:
        if name != "flash_attn":  # two packages have this module
            with suppress(importlib.metadata.PackageNotFoundError):
                return [importlib.metadata.metadata(name)["Name"]]  # most packages have their module's name
        if not self:
            self.update(importlib.metadata.packages_distributions())
        return super().get(name, default)


@contextmanager
def _asking_for_packages_later() -> Iterator[None]:
    list_all = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = _PackagesByModule
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = list_all


@contextmanager
def _reading_models_once() -> Iterator[None]:
    with _asking_for_packages_later():
        yield
    import_utils: Any = sys.modules["transformers.utils.import_utils"]
    read_folder = functools.cache(import_utils.create_import_structure_from_path)

    def read(path: str | Path) -> dict[Any, Any]:
        """``path`` is a folder or a file in it."""
        return read_folder(os.path.dirname(path) if os.path.isfile(path) else str(path))

    import_utils.create_import_structure_from_path = read  # also for the folders within


@contextmanager
def _without_sklearn() -> Iterator[None]:
    """For this one module, scikit-learn is not installed. Other modules find it."""
    import transformers.utils as utils

    is_available, utils.is_sklearn_available = utils.is_sklearn_available, lambda: False
    try:
        yield
    finally:
        utils.is_sklearn_available = is_available


@contextmanager
def _keeping_kernels() -> Iterator[None]:
    """The cache is on a local disk, and stays off where files cannot be locked: FlashAttention-4 would wait
    15 s for a lock, and then end the run."""
    folder = Path(tempfile.gettempdir()) / f"megatron-vl-kernels-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022:
            with (folder / "locks").open("a") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
            os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    yield


CONTEXTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "flash_attn.cute.cache_utils": _keeping_kernels,
    "megatron.core": _compiling_later,
    "megatron.core.timers": functools.partial(_without_packages, "wandb", "torch.utils.tensorboard"),
    "transformers.utils.import_utils": _reading_models_once,
    "transformers.generation.candidate_generator": _without_sklearn,
}


def install_finders() -> None:
    """Installs the finders. Call it before the modules are imported; afterwards, it does nothing."""
    watched = {finder.module_name for finder in sys.meta_path if isinstance(finder, _ModuleFinder)}
    for name, context in CONTEXTS.items():
        if name not in sys.modules and name not in watched:
            sys.meta_path.insert(0, _ModuleFinder(name, context))
