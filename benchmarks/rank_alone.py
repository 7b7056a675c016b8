"""One rank's share of a run, alone on one GPU: its memory and its time without messages, beside the estimate.

    python benchmarks/rank_alone.py --ranks 8 --hf HF --data.seq_len 262144 --parallel.cp 8 [fields of a run]

The process is rank 0 of ``--ranks`` in torch's fake process group, and runs the benchmark's own steps
(:mod:`toolkit.bench.measure`). It owns the loader, and its tensors have the sizes that they have in the whole
run. A message arrives at once: an exchange returns what was sent, cut or filled with zeros to the size that
is due, and sums and gathered weights stay the rank's own. So losses mean nothing, and experts get the rows
that this rank sends. Pipelines are not supported, because their stages wait for real messages.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.platform import get_platform
from toolkit.bench.options import parse_bench_options


def return_own_message(target: Tensor, source: Tensor, *_: Any, **__: Any) -> Any:
    """Stands for an exchange or a reduce-scatter of any sizes."""
    sent, received = source.reshape(-1), target.view(-1)
    num_elements = min(sent.numel(), received.numel())
    received[:num_elements].copy_(sent[:num_elements])
    received[num_elements:].zero_()
    return SimpleNamespace(wait=lambda: None)


def join_fake_group(ranks: int) -> None:
    """Makes this process rank 0 of ``ranks``."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import mappings
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    dist.all_to_all_single = return_own_message
    dist.reduce_scatter_tensor = return_own_message  # Transformer Engine's
    mappings.dist_reduce_scatter_func = return_own_message
    # The fake group would copy this rank's weights over those of the other ranks.
    param_and_grad_buffer.dist_all_gather_func = lambda *_, **__: None


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True, help="ranks of the whole run")
    arguments, words = parser.parse_known_args(argv)
    ranks = arguments.ranks
    options = dataclasses.replace(parse_bench_options(words), part_steps=0)
    platform = get_platform(options.config.platform)
    join_fake_group(ranks)

    from megatron_vl.parallel.process_grid import make_grid
    from megatron_vl.planning.memory import stage_memories
    from megatron_vl.planning.row_statistics import make_assumed_rows
    from toolkit.bench.measure import build_bench_model, measure_workload

    options.check_ranks(ranks)
    layout, spec, config = options.resolve_layout(ranks), options.read_model_spec(), options.config
    if layout.pp > 1:
        raise SystemExit("parallel.pp must be 1")
    grid = make_grid(layout)
    model = build_bench_model(options, spec, platform, grid, layout)
    # Drawn text has only tokens of rank 0's part of the vocabulary. The logit of another one would come from
    # a rank that is not there, and the loss would be infinite, so that the optimizer would skip its update.
    own_vocab_size = spec.language.vocab_size // layout.tp
    model.spec = dataclasses.replace(
        spec, language=dataclasses.replace(spec.language, vocab_size=own_vocab_size)
    )
    rows = make_assumed_rows(spec, config.data.seq_len)
    [estimate] = stage_memories(config, spec, layout, grid.dp, patch_count=int(rows.mean_patches))
    print(f"rank 0 of {ranks}: {layout}")
    print(f"estimate for rows of pictures in GiB, with logits of all tokens: {estimate.as_json()}")

    for workload in options.workloads:
        micro_batches = config.global_batch_size // grid.dp
        figures = measure_workload(model, workload, micro_batches, gpu_peak_tflops=0.0)
        memory = {name: size for name, size in figures["memory"].items() if "by_rank" not in name}
        step_text = f"{1e3 * figures['step_s']:.0f} ms a step, loss {figures['loss']:.3f}"
        print(f"{workload}: {step_text}, measured {memory}", flush=True)


if __name__ == "__main__":
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", torch.__version__)
    main(sys.argv[1:])
