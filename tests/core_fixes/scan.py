"""Finds in source where packages reach into Megatron-core, Energon, Transformer Engine and torch."""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("megatron_vl", "converters", "data_tools", "toolkit")
FOREIGN = ("megatron", "transformer_engine", "torch")
SETTINGS = ("TransformerConfig", "ProcessGroupCollection")
"""Classes of core whose objects are there to be filled in."""
SWITCHES = "torch.backends."
"""Torch's public switches."""
OTHERS = {
    "_replace": "of named tuples: public, with an underscore so that no field can have its name",
    "_option_string_actions": "of argparse",
    "_attn_implementation": "of transformers",
}
"""Private names of other packages and of Python, which the register does not list."""


@dataclass(frozen=True)
class Reach:
    """One place that reaches into a dependency."""

    module: str
    line: int
    scope: str
    """The class or function at the top level of the module that it is in; empty outside of them."""
    target: str
    """The dotted name of what is reached; of an object that is not known, its attribute alone."""

    def __str__(self) -> str:
        return f"{self.module}:{self.line} ({self.scope}): {self.target}"


class Module:
    """The source of one module and what its names stand for."""

    def __init__(self, path: Path) -> None:
        self.name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        self.tree = ast.parse(path.read_text())
        self.own: set[str] = set()
        """Names that the module itself defines."""
        self.names: dict[str, str] = {}
        """Name -> dotted name of what was imported under it, or assigned from that."""
        nodes = list(ast.walk(self.tree))
        for node in nodes:
            match node:
                case (
                    ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store())
                ):
                    self.own.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    self.own.add(name)
                case ast.Import(names=names):
                    for each in names:
                        package = each.name.partition(".")[0]
                        self.names[each.asname or package] = each.name if each.asname else package
                case ast.ImportFrom(module=str(origin), names=names):
                    self.names |= {each.asname or each.name: f"{origin}.{each.name}" for each in names}
        for node in nodes:
            match node:
                case ast.Assign(targets=targets, value=value):
                    self._learn(targets, value)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._learn([target], value)

    def _learn(self, targets: list[ast.expr], value: ast.expr) -> None:
        for target in targets:
            if isinstance(target, ast.Name) and (known := self.dotted(value)):
                self.names.setdefault(target.id, known)

    def dotted(self, node: ast.AST) -> str:
        """What an expression stands for; empty where that is not known. An object has its class's name."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name, "")
            case ast.Attribute(value=value, attr=name):
                base = self.dotted(value)
                return f"{base}.{name}" if base else ""
            case ast.Call(func=func):
                called = self.dotted(func)
                return called if called.rpartition(".")[2].lstrip("_")[:1].isupper() else ""
        return ""

    @cached_property
    def inherited(self) -> set[str]:
        """What the modules define that hold the base classes of this module's classes."""
        classes = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]
        origins = {self.dotted(base).rpartition(".")[0] for kind in classes for base in kind.bases}
        return set().union(*(module.own for module in modules() if module.name in origins))


def is_foreign(name: str) -> bool:
    return name.partition(".")[0] in FOREIGN


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def modules() -> list[Module]:
    return [Module(path) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def reaches(find: Callable[[Module, ast.AST], list[str]]) -> list[Reach]:
    """What ``find`` names of each node, with the top-level class or function that it is in."""
    return [
        Reach(module.name, node.lineno, getattr(top, "name", ""), target)
        for module in modules()
        for top in module.tree.body
        for node in ast.walk(top)
        for target in find(module, node)
    ]


def foreign_bases(module: Module, node: ast.AST) -> list[str]:
    bases = [module.dotted(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
    return [base for base in bases if is_foreign(base) and not base.startswith("torch.")]


def assigned(module: Module, node: ast.AST) -> list[str]:
    """Attributes of the dependencies' modules, classes and objects that are set."""
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            target = module.dotted(node)
        case ast.Call(func=ast.Name(id="setattr"), args=[owner, *_]):
            target = module.dotted(owner)
        case _:
            return []
    is_public = target.startswith(SWITCHES) or any(f".{kind}." in target for kind in SETTINGS)
    return [target] if is_foreign(target) and not is_public else []


def private_names(module: Module, node: ast.AST) -> list[str]:
    """Private names that are imported, or read of what is not defined in the same module.

    What a class inherits from a class of this project counts as its own.
    """
    match node:
        case ast.ImportFrom(module=str(origin), names=names) if is_foreign(origin):
            imported = [each.name for each in names]
            if not any(map(is_private, origin.split("."))):
                imported = list(filter(is_private, imported))
            return [f"{origin}.{name}" for name in imported]
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name) if name in module.inherited:
            return []
        case ast.Attribute(attr=name) if is_private(name) and name not in module.own | OTHERS.keys():
            known = module.dotted(node) or name
            return [known] if is_foreign(known) or known == name else []
    return []


def silenced(module: Module, node: ast.AST) -> list[str]:
    """Filters of warnings, and levels of loggers that are set."""
    is_filter = isinstance(node, ast.Attribute) and node.attr in ("filterwarnings", "setLevel")
    return [node.attr] if is_filter and module.name.startswith("megatron_vl") else []
