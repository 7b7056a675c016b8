"""Writes a run's metrics to JSON lines, TensorBoard and Weights & Biases.

Each of them is a :class:`MetricsSink`. :func:`open_metrics_sinks` opens those that a run asks for, on rank 0.
A new one needs a subclass and a line in that function.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_vl.config import TrainConfig
from megatron_vl.system import durable_files
from megatron_vl.system.durable_files import drop_incomplete_line
from megatron_vl.system.errors import UserError, naming_file
from megatron_vl.system.json_files import write_json
from megatron_vl.training.state.keep import EVALUATIONS_FILE

STEP_LOG_FILES = ("metrics.jsonl", EVALUATIONS_FILE, "quarantine.jsonl", "samples.jsonl")
"""Files in the folder of the checkpoints whose lines begin with the step that they belong to."""
SPEED_METRICS = (
    *("step_s", "tokens_per_s_per_rank", "tflops_per_rank", "vision_flops_share", "mfu"),
    *("memory_gib", "data_wait_s"),
)
WANDB_RUN_FILE = "wandb.json"
WANDB_FINISH_TIMEOUT_S = 60
"""Seconds that the end of a run waits at most for metrics that W&B has not sent yet."""


@dataclass
class ValidationResult:
    """The result of an evaluation, equal on all ranks."""

    loss: float
    loss_tokens: int
    elapsed_s: float
    rows: str = ""
    more_metrics: dict[str, float] = field(default_factory=dict)
    """Numbers beside the loss by name."""
    more_text: str = ""
    """The same as a part of a printed line."""


class MetricsSink:
    """One destination of metrics. A sink ignores metrics that it does not show."""

    def write_step(self, metrics: Mapping[str, Any]) -> None:
        """Writes the numbers of a printed line, ``step`` among them."""

    def write_evaluation(self, step: int, result: ValidationResult) -> None:
        """Writes the validation loss."""

    def close(self, has_failed: bool = False) -> None:
        """Ends the writing.

        Args:
            has_failed: whether the run ends with an error, which the other ranks do not know of yet.
        """


def open_metrics_sinks(config: TrainConfig) -> list[MetricsSink]:
    """The sinks of a run; on rank 0."""
    sinks: list[MetricsSink] = []
    if config.checkpoint.dir:
        sinks.append(JsonLinesSink(Path(config.checkpoint.dir)))
    if config.log.tensorboard:
        sinks.append(TensorBoardSink(config.log.tensorboard))
    if config.wandb.project:
        sinks.append(WandbSink(config))
    return sinks


class JsonLinesSink(MetricsSink):
    """``metrics.jsonl`` and ``eval.jsonl`` beside the checkpoints."""

    def __init__(self, run_dir: Path) -> None:
        durable_files.make_dirs(run_dir)
        self.run_dir = run_dir
        for name in STEP_LOG_FILES:
            drop_incomplete_line(run_dir / name)

    def write_step(self, metrics: Mapping[str, Any]) -> None:
        append_lines(self.run_dir / "metrics.jsonl", [metrics])

    def write_evaluation(self, step: int, result: ValidationResult) -> None:
        numbers = {"loss": result.loss, "loss_tokens": result.loss_tokens, "seconds": result.elapsed_s}
        numbers |= result.more_metrics
        append_lines(self.run_dir / EVALUATIONS_FILE, [{"step": step, **numbers, "rows": result.rows}])


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Appends lines of JSON, which has no NaN and no infinity: such numbers of a record become null."""
    # A file name that is no UTF-8 has surrogates in Python; written like this, they are JSON's own escapes.
    with naming_file(path), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        for record in records:
            values = {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in record.items()
            }
            file.write(json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n")


class TensorBoardSink(MetricsSink):
    """Events of ``log.tensorboard``, in the groups ``train``, ``val`` and ``speed``."""

    def __init__(self, tensorboard_dir: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.summary_writer = SummaryWriter(tensorboard_dir)

    def write_step(self, metrics: Mapping[str, Any]) -> None:
        for name, value in scalar_metrics(metrics).items():
            group = "speed" if name in SPEED_METRICS else "train"
            self.summary_writer.add_scalar(f"{group}/{name}", value, metrics["step"])
        self.summary_writer.flush()

    def write_evaluation(self, step: int, result: ValidationResult) -> None:
        for name, value in {"loss": result.loss, **result.more_metrics}.items():
            self.summary_writer.add_scalar(f"val/{name}", value, step)
        self.summary_writer.flush()

    def close(self, has_failed: bool = False) -> None:
        self.summary_writer.close()


class WandbSink(MetricsSink):
    """A run of Weights & Biases, the same one after a resume.

    ``step`` is a metric and the axis of all others. W&B's own counter never goes back, so it would drop the
    steps that a killed or rolled-back run repeats. If W&B fails during a run, the run continues without it.
    """

    def __init__(self, config: TrainConfig) -> None:
        import wandb

        self.is_disconnected = False
        run_dir, earlier_run_id = config.checkpoint.dir, _earlier_wandb_run(config)
        settings: dict[str, Any] = {"console": "off"}  # forked loader workers inherit it, and raise there
        if "WANDB_FINISH_TIMEOUT" not in os.environ:
            settings["finish_timeout"] = WANDB_FINISH_TIMEOUT_S
        try:
            self.wandb_run = wandb.init(
                project=config.wandb.project,
                name=os.environ.get("WANDB_NAME") or (Path(run_dir).resolve().name if run_dir else None),
                dir=os.environ.get("WANDB_DIR") or run_dir or None,
                id=earlier_run_id,
                resume="allow",
                config=asdict(config),
                allow_val_change=True,
                settings=wandb.Settings(**settings),
            )
            # W&B's hooks on imports report to its service, which raises in forked loader workers.
            sys.meta_path[:] = [
                finder for finder in sys.meta_path if not type(finder).__module__.startswith("wandb.")
            ]
            self.wandb_run.define_metric("step")
            self.wandb_run.define_metric("*", step_metric="step")
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"wandb.project {config.wandb.project}: W&B says: {text}. Log in (wandb login, or"
                f" $WANDB_API_KEY), set WANDB_MODE=offline, or leave wandb.project empty"
            ) from error
        if run_dir and not self.wandb_run.disabled:  # as by $WANDB_MODE
            write_json(Path(run_dir) / WANDB_RUN_FILE, {"id": self.wandb_run.id} | _wandb_place(config))

    def write_step(self, metrics: Mapping[str, Any]) -> None:
        self._try_wandb_call(self.wandb_run.log, {"step": metrics["step"], **scalar_metrics(metrics)})

    def write_evaluation(self, step: int, result: ValidationResult) -> None:
        numbers = {f"validation_{name}": value for name, value in result.more_metrics.items()}
        self._try_wandb_call(self.wandb_run.log, {"step": step, "validation_loss": result.loss, **numbers})

    def close(self, has_failed: bool = False) -> None:
        # Sending what is left may take a while. Without it, W&B marks the run as crashed, which it is.
        if not has_failed:
            self._try_wandb_call(self.wandb_run.finish)

    def _try_wandb_call(self, wandb_call: Callable[..., Any], *call_args: Any) -> None:
        if self.is_disconnected:
            return
        try:
            wandb_call(*call_args)
        except Exception as error:  # of any kind: a run does not end because a service is gone
            self.is_disconnected = True
            text = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"NOTE: nothing more is sent to W&B ({text})", file=sys.stderr, flush=True)


def scalar_metrics(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers that can be plotted over the steps, without ``step`` itself."""
    return {
        name: value for name, value in metrics.items() if isinstance(value, int | float) and name != "step"
    }


def _wandb_place(config: TrainConfig) -> dict[str, str]:
    return {"project": config.wandb.project, "entity": os.environ.get("WANDB_ENTITY", "")}


def _earlier_wandb_run(config: TrainConfig) -> str | None:
    """Id of the W&B run that this run continues; None for a new one. Raises UserError if it is damaged."""
    if not (config.checkpoint.dir and (run_file := Path(config.checkpoint.dir) / WANDB_RUN_FILE).is_file()):
        return None
    try:
        run_record = json.loads(run_file.read_text())
        is_same = all(run_record[name] == value for name, value in _wandb_place(config).items())
        return str(run_record["id"]) if is_same else None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run_file} is damaged ({error}); delete it to begin another W&B run") from error
