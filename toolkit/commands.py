"""The register of commands. A command's folder has ``options.py`` (a dataclass) and ``command.py``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from toolkit.options import CommandOptions


@dataclass(frozen=True)
class Command:
    """The location of a command's code. Its modules are imported only when the command is used."""

    folder: str
    """The folder of its modules, ``toolkit.FOLDER.options`` and ``toolkit.FOLDER.command``."""
    options: str
    """The name of the dataclass in ``options``."""
    function: str
    """The name of the function in ``command``, which takes the options and returns the exit code."""

    def load_options(self) -> type[CommandOptions]:
        return getattr(importlib.import_module(f"toolkit.{self.folder}.options"), self.options)

    def load_function(self) -> Callable[[CommandOptions], int]:
        return getattr(importlib.import_module(f"toolkit.{self.folder}.command"), self.function)


COMMANDS = {
    "train": Command("train", "TrainOptions", "train"),
    "plan": Command("plan", "PlanOptions", "plan"),
    "convert": Command("weights", "ConvertOptions", "convert"),
    "split": Command("weights", "SplitOptions", "split"),
    "merge": Command("weights", "MergeOptions", "merge"),
    "export": Command("weights", "ExportOptions", "export"),
    "verify": Command("weights", "VerifyOptions", "verify"),
    "data convert": Command("data", "DataConvertOptions", "convert"),
    "data merge": Command("data", "DataMergeOptions", "merge"),
    "data verify": Command("data", "DataVerifyOptions", "verify"),
    "data index": Command("data", "DataIndexOptions", "index"),
    "data stats": Command("data", "DataStatsOptions", "stats"),
    "data inspect": Command("data", "DataInspectOptions", "inspect"),
    "checkpoint show": Command("checkpoint", "ShowOptions", "show"),
    "checkpoint verify": Command("checkpoint", "CheckpointVerifyOptions", "verify"),
    "generate": Command("generate", "GenerateOptions", "generate"),
    "parity": Command("parity", "ParityOptions", "parity"),
    "evaluate": Command("evaluate", "EvaluateOptions", "evaluate"),
    "bench": Command("bench", "BenchOptions", "bench"),
    "doctor": Command("doctor", "DoctorOptions", "doctor"),
    "demo": Command("demo", "DemoOptions", "demo"),
}
"""Maps the words of the command line to the command."""


def groups() -> dict[str, list[str]]:
    """Maps the first word of two-word commands to their second words."""
    found: dict[str, list[str]] = {}
    for name in COMMANDS:
        first, _, second = name.partition(" ")
        if second:
            found.setdefault(first, []).append(second)
    return found
