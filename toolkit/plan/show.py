"""Prints a plan: the layout, its stages, its memory, and how the others compare."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from megatron_vl.planning.memory import GIB, RESERVE_GIB
from megatron_vl.planning.predict import Prediction
from megatron_vl.planning.search import AS_IT_IS, changed_sections, describe, options_of, why_slower
from megatron_vl.words import counted
from toolkit.memory_table import WIDTH, memory_table

from .result import Plan


def show(result: Plan) -> None:
    """Prints all that a person decides by."""
    from rich.console import Console

    out = Console(highlight=False, file=sys.stdout)
    wide = Console(width=max(out.width, WIDTH), highlight=False, file=sys.stdout, soft_wrap=False)
    wanted, best = result.wanted, result.best
    c = wanted.calibration
    print(
        f"{wanted.spec.family} on {wanted.world} x {c.gpu}, rows of {wanted.config.data.seq_len} tokens,"
        f" {counted(wanted.config.global_batch_size, 'row')} a step"
    )
    for line in (*_rows(result), *_layout(best)):
        print(line)
    wide.print(_stages(best))
    memory = [stage.memory.as_json() for stage in best.stages]
    wide.print(memory_table(memory, "Memory of a GPU in GiB"))
    for line in _speed(best):
        print(line)
    if result.found is not None:
        wide.print(_others(result))
        for lost in result.found.lost[:3]:
            print(f"does not fit: {lost.text} ({lost.why})")
    if not best.fits:
        print(_too_large(result))
    print(f"{'' if c.measured else 'note: '}{c.source}")


def _rows(result: Plan) -> list[str]:
    rows = result.wanted.rows
    error = f", mean good to {rows.patches_error:.1%}" if rows.sampled else ""
    return [
        f"rows: {rows.source}",
        f"  {rows.tokens:,.0f} tokens, {rows.loss_tokens:,.0f} with loss, {rows.pictures:.1f} pictures,"
        f" {rows.patches:,.0f} patches (spread {rows.spread:.0%}{error}) a row",
    ]


def _layout(best: Prediction) -> list[str]:
    return [f"layout: {describe(best.config, best.layout, best.dp)}", f"  {options_of_layout(best)}"]


def options_of_layout(best: Prediction) -> str:
    """The layout as options of ``train``."""
    from megatron_vl.config import OptimizerConfig, TrainConfig

    # Of the optimizer, only what memory depends on belongs to a layout; the rest is the run's own.
    default = OptimizerConfig()
    optimizer = dataclasses.replace(
        best.config.optimizer,
        offload_fraction=default.offload_fraction,
        moments_dtype=default.moments_dtype,
    )
    bare = TrainConfig(optimizer=optimizer)
    words = changed_sections(bare, best)
    rows = best.config.global_batch_size
    if rows != bare.global_batch_size:
        words.append(f"--global_batch_size {rows}")
    return " ".join(words) or AS_IT_IS


def _stages(best: Prediction) -> Any:
    from rich.table import Table

    table = Table(
        "stage",
        "decoder layers",
        "parameters",
        "forward ms",
        "backward ms",
        "GiB",
        "reduce ms",
        "update ms",
        title="Each stage: layers of its chunks, parameters and memory of a GPU, time of a row",
    )
    for i, stage in enumerate(best.stages):
        layers = " + ".join(str(n) for n in stage.layers)
        ends = [name for name, here in (("tower", i == 0), ("head", i == best.layout.pp - 1)) if here]
        table.add_row(
            str(i),
            f"{layers} ({', '.join(ends)})" if ends else layers,
            f"{stage.parameters / 1e9:.2f} B",
            f"{1e3 * sum(chunk.forward for chunk in stage.chunks):.1f}",
            f"{1e3 * sum(chunk.backward for chunk in stage.chunks):.1f}",
            f"{stage.memory.total / GIB:.1f}",
            f"{1e3 * stage.exposed:.0f}",
            f"{1e3 * stage.update:.0f}",
        )
    return table


def _speed(best: Prediction) -> list[str]:
    waits = f", stages wait {best.bubble:.1%} of the pipeline's time" if best.layout.pp > 1 else ""
    return [
        f"step: {best.step:.2f} s, {best.tokens_per_second:,.0f} tokens/s, {best.mfu:.1%} MFU{waits};"
        f" {best.hours_per_billion_tokens:.1f} hours per billion tokens",
        f"fullest GPU: {best.peak_gib:.1f} of {best.calibration.memory_gib:.1f} GiB,"
        f" of which {RESERVE_GIB:.0f} should stay free",
    ]


def _others(result: Plan) -> Any:
    from rich.table import Table

    assert result.found is not None
    table = Table(
        "layout", "s a step", "MFU", "GiB", "why slower", title=f"Of {result.found.combinations} combinations"
    )
    rows = list(zip(result.found.best, ("", *result.found.reasons), strict=True))
    if (own := result.own) is not None:
        why = why_slower(result.best, own)
        rows.append((own, f"the run's own, {why if own.fits else 'does not fit'}"))
    for prediction, why in rows:
        table.add_row(
            describe(prediction.config, prediction.layout, prediction.dp),
            f"{prediction.step:.2f}",
            f"{prediction.mfu:.1%}",
            f"{prediction.peak_gib:.0f}",
            why,
        )
    return table


def _too_large(result: Plan) -> str:
    best = result.best
    said = f"does not fit: {best.peak_gib:.0f} GiB and {RESERVE_GIB:.0f} to stay free"
    if result.instead is None:
        return f"{said}; nothing else fits either: take more GPUs, or lower data.seq_len"
    return f"{said}; what would: {options_of(result.wanted.config, result.instead)}"
