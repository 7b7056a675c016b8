"""Finds where the packages reach into Megatron-core, Energon, Transformer Engine and torch, by reading their
source."""

import ast
from dataclasses import dataclass, field
from functools import cache
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


@dataclass
class Module:
    """The source of one module and what its names stand for."""

    name: str
    tree: ast.Module
    names: dict[str, str] = field(default_factory=dict)
    """Name -> dotted name of what was imported under it, or assigned from that."""
    own: set[str] = field(default_factory=set)
    """Names that the module itself defines."""

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            self._learn_definition(node)
            self._learn_import(node)
        for node in ast.walk(self.tree):
            self._learn_assignment(node)

    def _learn_definition(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self.own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            self.own.add(node.attr)

    def _learn_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for name in node.names:
                self.names[name.asname or name.name.partition(".")[0]] = (
                    name.name if name.asname else name.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                self.names[name.asname or name.name] = f"{node.module}.{name.name}"

    def _learn_assignment(self, node: ast.AST) -> None:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            return
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and (known := self.dotted(node.value)):
                self.names.setdefault(target.id, known)

    def dotted(self, node: ast.AST) -> str:
        """What an expression stands for; empty where that is not known. An object has its class's name."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        if not isinstance(node, ast.Call):
            return ""
        called = self.dotted(node.func)
        return called if called.rpartition(".")[2].lstrip("_")[:1].isupper() else ""


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_foreign(name: str) -> bool:
    return name.partition(".")[0] in FOREIGN


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def modules() -> list[Module]:
    """Every module of the packages."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.append(Module(name, ast.parse(path.read_text())))
    return found


@cache
def all_nodes() -> list[tuple[Module, str, ast.AST]]:
    """Every node of every module that can reach, with the top-level class or function that it is in."""
    return [
        (module, top.name if isinstance(top, (ast.ClassDef, ast.FunctionDef)) else "", node)
        for module in modules()
        for top in module.tree.body
        for node in ast.walk(top)
        if isinstance(node, (ast.Attribute, ast.Call, ast.ClassDef, ast.ImportFrom))
    ]


def subclasses() -> list[Reach]:
    """Classes that are made from classes of core, Energon and Transformer Engine."""
    found = []
    for module, scope, node in all_nodes():
        bases = [module.dotted(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
        foreign = [base for base in bases if is_foreign(base) and not base.startswith("torch.")]
        found += [Reach(module.name, node.lineno, scope, base) for base in foreign]  # type: ignore[attr-defined]
    return found


def modules_of_bases(module: Module) -> set[str]:
    """The modules that hold the base classes of a module's classes."""
    classes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    return {module.dotted(base).rpartition(".")[0] for kind in classes for base in kind.bases}


def assignments() -> list[Reach]:
    """Attributes of the dependencies' modules, classes and objects that are set."""
    found = []
    for module, scope, node in all_nodes():
        target = _assigned(module, node)
        public = target.startswith(SWITCHES) or any(f".{kind}." in target for kind in SETTINGS)
        if is_foreign(target) and not public:
            found.append(Reach(module.name, node.lineno, scope, target))  # type: ignore[attr-defined]
    return found


def _assigned(module: Module, node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return module.dotted(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        return module.dotted(node.args[0])
    return ""


def private_names() -> list[Reach]:
    """Private names that are imported, or read of what is not defined in the same module.

    What a class inherits from a class of this project counts as its own.
    """
    found = []
    defined = {module.name: module.own for module in modules()}
    inherited = {
        module.name: set().union(*(defined.get(base, set()) for base in modules_of_bases(module)))
        for module in modules()
    }
    for module, scope, node in all_nodes():
        target = _private_name(module, node, inherited[module.name])
        if target and target not in OTHERS:
            found.append(Reach(module.name, node.lineno, scope, target))  # type: ignore[attr-defined]
    return found


def _private_name(module: Module, node: ast.AST, inherited: set[str]) -> str:
    if isinstance(node, ast.ImportFrom) and node.module and is_foreign(node.module):
        names = [name.name for name in node.names]
        if not any(map(is_private, node.module.split("."))):
            names = list(filter(is_private, names))
        return f"{node.module}.{names[0]}" if names else ""
    if not isinstance(node, ast.Attribute) or not is_private(node.attr) or node.attr in module.own:
        return ""
    if is_self(node.value) and node.attr in inherited:
        return ""
    known = module.dotted(node)
    return known if is_foreign(known) else "" if known else node.attr


def silenced() -> list[Reach]:
    """Modules that filter warnings, or set the level of a logger."""
    return [
        Reach(module.name, node.lineno, scope, node.attr)
        for module, scope, node in all_nodes()
        if isinstance(node, ast.Attribute) and node.attr in ("filterwarnings", "setLevel")
    ]
