"""Functions that the tests of this folder run in separate processes (:func:`tests.support.ranks.call`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

from megatron_vl.config import parse_config
from megatron_vl.models.moe.router import iterate_routers
from megatron_vl.parallel.process_grid import init_distributed
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import read_spec

Stages = list[list[list[Any]]]
"""[stage][tensor] -> [name, shape, trained]."""


def order_of_chunks(pp: int, vpp: int, micro_batches: int, stage: int) -> list[int]:
    """Core's order of forward (positive) and backward (negative) passes of a stage's chunks,
    counted from 1."""
    group = SimpleNamespace(size=lambda: pp, rank=lambda: stage)
    place = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None)
    warm_up = get_pp_rank_microbatches(micro_batches, vpp, pp, p2p_communicator=place)[2]
    return convert_schedule_table_to_order(warm_up, vpp, get_schedule_table(micro_batches, vpp, pp))


def built_examples(
    schedules: list[tuple[int, int, int]], examples: dict[str, tuple[str, str, str]]
) -> dict[str, Any]:
    """Core's orders of ``schedules``, and the tensors of the modules that each example builds."""
    get_platform("cpu")
    return {
        "orders": [[order_of_chunks(pp, vpp, n, stage) for stage in range(pp)] for pp, vpp, n in schedules],
        "built": {name: _tensors(*example) for name, example in examples.items()},
    }


def _tensors(path: str, hf: str, world: str) -> Stages:
    from tests.support.dry_build import dry_build

    stages = dry_build(parse_config(["--config", path]), read_spec(hf), int(world))
    return [
        [[tensor.tensor_name, tensor.tensor_shape, tensor.is_trained] for tensor in stage] for stage in stages
    ]


def busiest_experts(hf: str) -> list[float]:
    """Per layer, the busiest expert's tokens over the mean, with ``--even-routing``
    and indifferent routers."""
    from megatron_vl.train import train
    from toolkit.bench.measure import Measure
    from toolkit.bench.options import parse_bench_options

    loads = []

    class Indifferent(Measure):
        def begin(self, trainer: Any) -> None:
            super().begin(trainer)
            for router in iterate_routers(trainer.model_chunks):
                # all experts are equally good: the router takes the same ones for each token
                router.weight.data.zero_()

        def end(self, trainer: Any, has_failed: bool) -> None:
            loads.extend(router.load for router in iterate_routers(trainer.model_chunks))

    shape = "--data.seq_len 256 --global_batch_size 1 --dtype float32 --platform cpu"
    words = f"--data.path synthetic:text --even-routing --timed 1 {shape}".split()
    bench_run = parse_bench_options(["--model.hf", hf, *words])
    train(bench_run.config, bench_run.spec, [Indifferent(bench_run)])
    return [float(load.max() / load.float().mean()) for load in loads]


def benchmark_that_fails_in_text(options: list[str]) -> None:
    """A benchmark whose second kind of rows finds no memory."""
    from toolkit.bench.measure import Measure, measure_benchmark
    from toolkit.bench.options import parse_bench_options

    before_step = Measure.before_step

    def fail_in_text(measure: Measure, trainer: Any) -> None:
        before_step(measure, trainer)
        if measure.name == "text":
            raise RuntimeError("no memory for rows of text")

    Measure.before_step = fail_in_text
    measure_benchmark(parse_bench_options(options))


def card_losses(hf: str, folder: str, dtype: str, steps: int, lr: float) -> dict[str, Any]:
    """Gaps to a card's losses in transformers: here, there with other kernels, here with another rate."""
    from benchmarks import card

    platform = get_platform("cpu")
    init_distributed(platform)
    run = card.prepare_curve(read_spec(hf), Path(folder), "cpu", steps=steps, learning_rate=lr)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, dtype=dtype))
    other = dataclasses.replace(run.config, optimizer=dataclasses.replace(run.config.optimizer, lr=3 * lr))

    expected = card.train_in_transformers(run)
    found = {
        "same": card.train_here(run),
        "eager": card.train_in_transformers(run, attention="eager"),
        "other rate": card.train_here(dataclasses.replace(run, config=other)),
    }
    return {name: card.curve_gap(losses, expected) for name, losses in found.items()}
