"""Where a run's numbers go beside its printed lines: JSON lines, TensorBoard, Weights & Biases.

Each is a :class:`Sink`; :func:`open_sinks` opens those that a run asks for, on rank 0. Another one is a
further subclass and a line there.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.config import TrainConfig
from megatron_vl.errors import UserError
from megatron_vl.json_files import write_json
from megatron_vl.training.evaluation import Evaluation

WANDB_FILE = "wandb.json"
"""In the folder of the checkpoints: which W&B run this is."""
FINISH_S = 60
"""Longest wait in seconds, at the end of a run, for what W&B has not sent yet."""


class Sink:
    """One place that numbers go to. A sink leaves alone what it has no use for."""

    def step(self, numbers: Mapping[str, Any]) -> None:
        """The numbers of a printed line; ``step`` is among them."""

    def expert_load(self, step: int, shares: Mapping[int, Tensor]) -> None:
        """Layer -> tokens of each of its experts over the layer's mean, [E]."""

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Validation loss and answers."""

    def close(self, failed: bool = False) -> None:
        """The end. ``failed``: the run ends with an error, which the other ranks do not know of yet."""


def open_sinks(config: TrainConfig) -> list[Sink]:
    """The sinks of a run; on rank 0.

    Raises:
        OSError: a folder cannot be written.
        UserError: W&B refuses the run.
    """
    sinks: list[Sink] = []
    if config.checkpoint.dir:
        sinks.append(JsonLines(Path(config.checkpoint.dir)))
    if config.log.tensorboard:
        sinks.append(TensorBoard(config.log.tensorboard))
    if config.wandb.project:
        sinks.append(Wandb(config))
    return sinks


class JsonLines(Sink):
    """``metrics.jsonl`` and ``eval.jsonl`` beside the checkpoints."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.file = (folder / "metrics.jsonl").open("a")

    def step(self, numbers: Mapping[str, Any]) -> None:
        self.file.write(_line(numbers))
        self.file.flush()

    def evaluation(self, step: int, result: Evaluation) -> None:
        numbers = {
            "step": step,
            "loss": result.loss,
            "loss_tokens": result.loss_tokens,
            "seconds": result.seconds,
            "answers": [asdict(answer) for answer in result.answers],
        }
        with (self.folder / "eval.jsonl").open("a") as file:
            file.write(_line(numbers))

    def close(self, failed: bool = False) -> None:
        self.file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(numbers: Mapping[str, Any]) -> str:
    """The numbers as a line of JSON, which has no NaN and no infinity: they become null."""
    known = _finite(numbers)
    return json.dumps(known, ensure_ascii=False, allow_nan=False) + "\n"


class TensorBoard(Sink):
    """Events of ``log.tensorboard``."""

    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(folder)

    def step(self, numbers: Mapping[str, Any]) -> None:
        for name, value in scalars(numbers).items():
            self.board.add_scalar(name, value, numbers["step"])
        self.board.flush()

    def expert_load(self, step: int, shares: Mapping[int, Tensor]) -> None:
        for layer, share in shares.items():
            self.board.add_scalar(_layer(layer), float(share.max()), step)
        self.board.add_histogram("expert_load/all", torch.cat(list(shares.values())), step)

    def evaluation(self, step: int, result: Evaluation) -> None:
        self.board.add_scalar("validation_loss", result.loss, step)
        for number, answer in enumerate(result.answers):
            text = "\n\n".join(f"**{name}**: {value}" for name, value in asdict(answer).items())
            self.board.add_text(f"answer_{number}", text, step)
        self.board.flush()

    def close(self, failed: bool = False) -> None:
        self.board.close()


class Wandb(Sink):
    """A run of Weights & Biases, the same one after a resume.

    ``step`` is a metric, and the axis of all others: W&B's own counter never goes back, and would drop the
    steps that a killed or rolled-back run repeats.

    Losing W&B in the middle of a run costs its curves and nothing else.

    Raises:
        UserError: W&B refuses to begin the run, as without a login.
    """

    def __init__(self, config: TrainConfig) -> None:
        import wandb

        wanted, folder = config.wandb, config.checkpoint.dir
        self.wandb = wandb
        self.lost = False

        before = _earlier_run(config)
        finish_s = {} if "WANDB_FINISH_TIMEOUT" in os.environ else {"finish_timeout": FINISH_S}
        try:
            self.run = wandb.init(
                project=wanted.project,
                entity=wanted.entity or None,
                name=wanted.name or (Path(folder).resolve().name if folder else None),
                mode=wanted.mode,
                dir=wanted.dir or folder or None,
                id=before,
                resume="allow",
                config=asdict(config),
                allow_val_change=True,
                # Forked loader workers inherit it, and what it does there raises: samples would be dropped.
                settings=wandb.Settings(console="off", **finish_s),
            )
            # Its hooks on imports report to its service, which raises in forked loader workers too.
            sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("wandb.")]
            self.run.define_metric("step")
            self.run.define_metric("*", step_metric="step")
        except Exception as error:
            raise UserError(_refused(error, config, before)) from error
        if folder and not self.run.disabled:  # as by $WANDB_MODE
            facts = {"id": self.run.id, "project": wanted.project, "entity": wanted.entity}
            write_json(Path(folder) / WANDB_FILE, facts)

    def step(self, numbers: Mapping[str, Any]) -> None:
        self._log(lambda: {"step": numbers["step"], **scalars(numbers)})

    def expert_load(self, step: int, shares: Mapping[int, Tensor]) -> None:
        def numbers() -> dict[str, Any]:
            busiest = {_layer(layer): float(share.max()) for layer, share in shares.items()}
            everything = torch.cat(list(shares.values())).numpy()
            return {"step": step, **busiest, "expert_load/all": self.wandb.Histogram(everything)}

        self._log(numbers)

    def evaluation(self, step: int, result: Evaluation) -> None:
        def numbers() -> dict[str, Any]:
            found: dict[str, Any] = {"step": step, "validation_loss": result.loss}
            rows = [asdict(answer) for answer in result.answers]
            if rows:
                data = [[str(value) for value in row.values()] for row in rows]
                found["answers"] = self.wandb.Table(columns=list(rows[0]), data=data)
            return found

        self._log(numbers)

    def close(self, failed: bool = False) -> None:
        # Sending what is left may take a while. Without it, W&B marks the run as crashed, which it is.
        if not failed and not self.lost:
            self._try(self.run.finish)

    def _log(self, numbers: Callable[[], dict[str, Any]]) -> None:
        if not self.lost:
            self._try(lambda: self.run.log(numbers()))

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # of whatever kind: a service that is gone is no reason to lose a training
            self.lost = True
            told = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"NOTE: nothing more is sent to W&B ({told})", file=sys.stderr, flush=True)


def scalars(numbers: Mapping[str, Any]) -> dict[str, int | float]:
    """What can be drawn over the steps; without ``step`` itself."""
    return {
        name: value for name, value in numbers.items() if isinstance(value, int | float) and name != "step"
    }


def _layer(number: int) -> str:
    return f"expert_load/layer_{number:02d}"


def _earlier_run(config: TrainConfig) -> str | None:
    """Id of the W&B run that this run goes on with; None: it begins one.

    Raises:
        UserError: the file that says it is damaged.
    """
    path = Path(config.checkpoint.dir) / WANDB_FILE
    if not (config.checkpoint.dir and config.checkpoint.resume and path.is_file()):
        return None
    try:
        facts = json.loads(path.read_text())
        same = facts["project"] == config.wandb.project and facts["entity"] == config.wandb.entity
        return str(facts["id"]) if same else None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it to begin another W&B run") from error


def _refused(error: Exception, config: TrainConfig, before: str | None) -> str:
    told = " ".join(str(error).split()) or type(error).__name__
    path = Path(config.checkpoint.dir) / WANDB_FILE
    anew = f"; delete {path} to begin another W&B run" if before else ""
    return (
        f"wandb.project {config.wandb.project}: W&B says: {told}. Log in (wandb login, or $WANDB_API_KEY),"
        f" give --wandb.mode offline, or leave wandb.project empty{anew}"
    )
