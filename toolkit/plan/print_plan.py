"""Prints a plan: the layouts that fit, and the first one with its stages and memory."""

import json
import math
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megatron_vl.config import TrainConfig
from megatron_vl.estimate.gpus import reserve_gib
from megatron_vl.estimate.parameters import count_parameters
from megatron_vl.estimate.rows import ASSUMED_ROWS_TEXT
from megatron_vl.estimate.search import SearchRequest, describe_layout
from megatron_vl.estimate.split import with_split
from megatron_vl.estimate.step import RunPrediction
from megatron_vl.system.plurals import count_text, pluralize, trained_text
from toolkit.common.memory_table import memory_table, wide_console


@dataclass(frozen=True)
class Plan:
    request: SearchRequest
    own: RunPrediction | None
    """The layout that the run sets, if it sets one."""
    fitting: list[RunPrediction]
    """The layouts that fit, fastest first."""

    @property
    def chosen(self) -> RunPrediction:
        """The run's own layout, or the fastest one."""
        return self.own or self.fitting[0]


def print_plan(found: Plan) -> None:
    console = wide_console()
    request, chosen = found.request, found.chosen
    gpu, rows = request.gpu, chosen.rows
    counts = count_parameters(request.config, request.spec)
    print(
        f"{request.spec.family}, {count_text(counts[0])} parameters, on {request.world_size} x"
        f" {gpu.name}{'' if gpu.is_measured else ' (not measured)'}, rows of"
        f" {request.config.data.seq_len} tokens, {pluralize(request.config.global_batch_size, 'row')} a step"
    )
    if trained := trained_text(*counts):
        print(trained)
    print(
        f"rows: {ASSUMED_ROWS_TEXT}\n  {rows.tokens:,.0f} tokens, {rows.loss_tokens:,.0f} with loss,"
        f" {rows.patches:,.0f} patches a row"
    )
    console.print(_layout_table(found))
    print(f"first layout: {run_options(chosen, found.request.config)}")
    console.print(memory_table([stage.as_json() for stage in chosen.stages], "Memory of a GPU in GiB"))
    for line in _memory_lines(found):
        print(line)


def _layout_table(found: Plan) -> Table:
    title = "Layouts that fit; times are those of bf16"
    table = Table("layout", "s a step", "tokens/s", "MFU", "GiB", "stages wait", title=title)
    for prediction in (*([found.own] if found.own else []), *found.fitting):
        text = describe_layout(prediction.config, prediction.layout, prediction.dp)
        if prediction is found.own:
            text = f"the run's own{'' if found.request.fits(prediction) else ', does not fit'}: {text}"
        table.add_row(
            text,
            f"{prediction.step_seconds:.2f}",
            f"{prediction.tokens_per_second:,.0f}",
            f"{prediction.mfu:.1%}",
            f"{prediction.peak_gib:.0f}",
            f"{prediction.bubble:.0%}",
        )
    return table


def _memory_lines(found: Plan) -> list[str]:
    chosen, request = found.chosen, found.request
    gpu_gib = request.gpu.memory_gib
    lines = [
        f"fullest GPU: {chosen.peak_gib:.1f} of {gpu_gib:.1f} GiB, of which {reserve_gib(gpu_gib):.0f} should"
        " stay free"
    ]
    if chosen.host_gib:
        limit = f"of {request.host_gib:.1f} " * (request.host_gib < math.inf)
        lines.append(f"host memory: {chosen.host_gib:.1f} {limit}GiB for each GPU of the fullest stage")
    if not request.fits(chosen):
        others = [f"what would: {run_options(each, request.config)}" for each in found.fitting[:1]]
        lines.append(f"the run does not fit; {' '.join(others) or 'nothing else fits either'}")
    return lines


def run_options(prediction: RunPrediction, base: TrainConfig) -> str:
    """A layout as options of ``train``, as far as it differs from the run ``base``: ``--parallel.pp 2``."""
    config = with_split(prediction.config, prediction.layout)
    words = [
        f"--{section}.{name} {_command_line_value(value)}"
        for section in ("parallel", "recompute", "optimizer", "vision")
        for name, value in vars(getattr(config, section)).items()
        if value != getattr(getattr(base, section), name)
    ]
    if config.global_batch_size != base.global_batch_size:
        words.append(f"--global_batch_size {config.global_batch_size}")
    return " ".join(words) or "the run as it is"


def _command_line_value(value: Any) -> str:
    is_json = value is None or isinstance(value, bool)
    return json.dumps(value) if is_json else str(value).replace(" ", "").replace("'", "")
