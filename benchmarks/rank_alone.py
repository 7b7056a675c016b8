"""One rank's share of a run, alone on one GPU: its memory and its time without messages, beside the estimate.

    python benchmarks/rank_alone.py --ranks 8 --model.hf HF --data.seq_len 262144 --parallel.cp 8 ...

The process is rank 0 of ``--ranks`` in torch's fake process group, and runs the trainer as ``megatron-vl
bench`` does. Its tensors have the sizes that they have in the whole run. A message comes from the GPU itself:
an exchange returns what was sent, cut or filled with zeros to the size that is due; sums and gathered weights
stay the rank's own. So losses mean nothing, and experts get the rows that this rank sends. Pipelines are not
supported, because their stages wait for real messages.

With ``--one-document``, the documents of a row are one, so that each token attends to all before it. What is
predicted is for the very rows that are drawn.
"""

import argparse
import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.data import synthetic
from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.estimate.flops import RowSizes
from megatron_vl.platform import get_platform
from megatron_vl.system import host_memory
from toolkit.bench.options import WARM_UP, parse_bench_options

COPY_GB_S = 2000
"""Rate at which an H200 copies within its memory, which stands for that of messages."""


def return_own_message(target: Tensor, source: Tensor, *_: Any, **__: Any) -> Any:
    """Stands for an exchange or a reduce-scatter of any sizes."""
    sent, received = source.reshape(-1), target.view(-1)
    num_elements = min(sent.numel(), received.numel())
    received[:num_elements].copy_(sent[:num_elements])
    received[num_elements:].zero_()
    if not received.is_cuda:
        return SimpleNamespace(wait=lambda: None)
    copied = torch.cuda.current_stream().record_event()
    # As that of a real message, also where another stream waits for it.
    return SimpleNamespace(wait=lambda: torch.cuda.current_stream().wait_event(copied))


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


def join_documents() -> None:
    """Makes the samples of each drawn row one sample."""
    draw_row = synthetic.draw_row

    def draw_joined_row(row: list[synthetic.ChosenSample]) -> list[TokenizedSample]:
        samples = draw_row(row)
        token_ids = torch.cat([sample.token_ids for sample in samples])
        loss_mask = torch.cat([sample.loss_mask for sample in samples])
        media_items = [item for sample in samples for item in sample.media_items]
        return [TokenizedSample(token_ids, loss_mask, media_items)]

    synthetic.draw_row = draw_joined_row


def drawn_sizes(config: Any, spec: Any, assumed: RowSizes) -> RowSizes:
    """The sizes of the first row that is drawn; its windows are as assumed."""
    samples = next(synthetic.draw_rows(config.data, spec))
    documents = [len(sample) for sample in samples]
    grids = [item.grid_thw for sample in samples for item in sample.media_items]
    frames = [grid.h * grid.w for grid in grids for _ in range(grid.t)]
    frame_pairs = sum(n * n for n in frames)
    return RowSizes(
        tokens=sum(documents),
        token_pairs=sum(n * n for n in documents),
        loss_tokens=sum(int(sample.loss_mask.sum()) for sample in samples),
        patches=sum(frames),
        frame_pairs=frame_pairs,
        window_pairs=assumed.window_pairs if spec.vision.window_size else frame_pairs,
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True, help="ranks of the whole run")
    parser.add_argument("--one-document", action="store_true", help="rows of one document")
    parser.add_argument("--predict", action="store_true", help="only predict")
    arguments, words = parser.parse_known_args(argv)
    if arguments.one_document:
        join_documents()
    bench_run = parse_bench_options(words)
    # The parts of a step are not timed: that needs the other ranks.
    timed_steps = len(bench_run.workloads) * (WARM_UP + bench_run.options.timed + 1)
    bench_run = bench_run._replace(config=dataclasses.replace(bench_run.config, stop_after=timed_steps))
    platform = get_platform(bench_run.config.platform)
    join_fake_group(arguments.ranks)

    from megatron_vl.estimate.gpus import find_gpu, local_gpu
    from megatron_vl.estimate.memory import GIB, stage_memories
    from megatron_vl.estimate.rows import assumed_rows
    from megatron_vl.estimate.step import predict_layout
    from megatron_vl.training.resolve import MachineMemory, resolve_run
    from megatron_vl.training.trainer import Trainer
    from toolkit.bench.measure import Measure

    memory = MachineMemory(platform.total_memory_gib(), host_memory.available_gib_per_rank())
    resolved_run = resolve_run(bench_run.config, arguments.ranks, memory, spec=bench_run.spec)
    spec, config, layout = resolved_run.spec, resolved_run.config, resolved_run.layout
    if layout.pp > 1:
        raise SystemExit("parallel.pp must be 1")
    print(f"rank 0 of {arguments.ranks}: {layout}")
    gpu = local_gpu() or find_gpu()
    with_itself = dataclasses.replace(gpu, link_gb_s=COPY_GB_S, network_gb_s=COPY_GB_S)
    predicted = {}
    for workload, data_config in bench_run.workloads.items():
        workload_config = dataclasses.replace(config, data=data_config)
        rows = drawn_sizes(workload_config, spec, assumed_rows(workload_config, spec))
        [memory_parts] = stage_memories(workload_config, spec, layout, resolved_run.dp, rows)
        alone, connected = (
            predict_layout(workload_config, spec, arguments.ranks, layout, each, rows)
            for each in (with_itself, gpu)
        )
        predicted[workload] = (
            f"{memory_parts.total_bytes / GIB:.1f} GiB, {1e3 * alone.step_seconds:.0f} ms a step"
            f" ({1e3 * connected.step_seconds:.0f} with messages), MFU {alone.mfu:.3f}"
        )
        print(f"{workload}: {rows}\n{workload}: predicted {predicted[workload]}, {memory_parts.as_json()}")
    if arguments.predict:
        return

    measure = Measure(bench_run)
    with Trainer(resolved_run, platform, [measure]) as trainer:
        trainer.build()
        # Drawn text has only tokens of rank 0's part of the vocabulary. The logit of another one would come
        # from a rank that is not there, and the loss would be infinite, so that the update would be skipped.
        own_vocab_size = spec.language.vocab_size // layout.tp
        trainer.spec = dataclasses.replace(
            spec, language=dataclasses.replace(spec.language, vocab_size=own_vocab_size)
        )
        trainer.run()
    for workload, speed in measure.figures["workloads"].items():
        print(f"{workload}: predicted {predicted[workload]}")
        step_text = f"{1e3 * speed['step_s']:.0f} ms a step, loss {speed['loss']:.3f}"
        # The work of all ranks was done in a step of this one.
        mfu = f"MFU {speed['mfu']:.3f}" if speed["mfu"] else "MFU of an unknown GPU"
        print(f"{workload}: measured {step_text}, {mfu}, {speed['memory_gib']:.2f} GiB", flush=True)


if __name__ == "__main__":
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", torch.__version__)
    main(sys.argv[1:])
