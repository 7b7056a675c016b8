"""The register of commands. A command's folder has ``options.py`` (a dataclass) and ``command.py``."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from toolkit.common.options import CommandOptions


@dataclass(frozen=True)
class Command:
    """The location of a command's code. Its modules are imported only when the command is used."""

    folder: str
    options: str
    """The name of the dataclass in ``toolkit.FOLDER.options``."""
    function: str
    """The name of the function in ``toolkit.FOLDER.command``. It takes the options, returns the exit code."""

    def load_options_class(self) -> type[CommandOptions]:
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
    "data index": Command("data", "DataIndexOptions", "index"),
    "data show": Command("data", "DataShowOptions", "show"),
    "checkpoint show": Command("checkpoint", "ShowOptions", "show"),
    "checkpoint verify": Command("checkpoint", "CheckpointVerifyOptions", "verify"),
    "checkpoint rollback": Command("checkpoint", "RollbackOptions", "rollback"),
    "checkpoint restart-data": Command("checkpoint", "RestartDataOptions", "restart_data"),
    "generate": Command("generate", "GenerateOptions", "generate"),
    "parity": Command("parity", "ParityOptions", "parity"),
    "evaluate": Command("evaluate", "EvaluateOptions", "evaluate"),
    "bench": Command("bench", "BenchOptions", "bench"),
    "doctor": Command("doctor", "DoctorOptions", "doctor"),
    "demo": Command("demo", "DemoOptions", "demo"),
}
"""Maps the words of the command line to the command."""
