"""Trains a real-size model with random weights for some steps and reports its speed.

    torchrun --nproc-per-node 8 -m toolkit.bench.shape --hf CONFIG_OR_FOLDER --rows images,text --steps 6 \\
        [--parallel.tp 2 ...any field of a run]

The model, the pipeline schedule, DDP, the optimizer and the feed are the trainer's; only the loader is replaced by
:mod:`toolkit.bench.workload`. The first steps warm up; the rest are timed as one span of wall clock.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import torch.distributed as dist
from jsonargparse import ArgumentParser

from megatron_vl.config import TrainConfig, validate
from megatron_vl.models.build import build_chunks
from megatron_vl.models.families import read_spec
from megatron_vl.parallel.grid import init_distributed, make_grid
from megatron_vl.parallel.layout import make_layout
from megatron_vl.platform import get_platform
from megatron_vl.training.feed import Feed
from megatron_vl.training.metrics import MetricsLog, say
from megatron_vl.training.optimizer import build_optimizer, set_learning_rates
from megatron_vl.training.step import train_step, wrap

from .workload import rows


def parse(argv: list[str]) -> tuple[str, list[str], int, int, dict[str, int], TrainConfig]:
    parser = ArgumentParser(prog="toolkit.bench.shape", description=__doc__.splitlines()[0])
    parser.add_argument("--hf", required=True, help="HF folder or config.json")
    parser.add_argument("--rows", default="images,text", help="workloads, comma-separated: images, text")
    parser.add_argument("--warm-up", type=int, default=2, help="untimed steps of each workload")
    parser.add_argument("--timed", type=int, default=4, help="timed steps of each workload")
    parser.add_argument("--language-layers", type=int, default=0, help="fewer decoder layers than the config has; 0: all")
    parser.add_argument("--vision-layers", type=int, default=0, help="fewer vision layers than the config has; 0: all")
    parser.add_class_arguments(TrainConfig)
    namespace = parser.parse_args(argv)
    own = {name: namespace.pop(name) for name in ("hf", "rows", "warm_up", "timed", "language_layers", "vision_layers")}
    config = parser.instantiate(namespace)
    config = TrainConfig(**{name: getattr(config, name) for name in TrainConfig.__dataclass_fields__})
    layers = {"language": own["language_layers"], "vision": own["vision_layers"]}
    return own["hf"], own["rows"].split(","), own["warm_up"], own["timed"], layers, config


def main(argv: list[str]) -> int:
    hf, workloads, warm_up, timed, layers, config = parse(argv)
    spec = read_spec(hf).replace_layers(**{name: n for name, n in layers.items() if n})
    p = config.parallel
    layout = make_layout(spec, p.tp, p.pp, p.vpp, p.layers)
    platform = get_platform(config.platform)
    init_distributed(platform)
    dp = validate(config, dist.get_world_size())
    grid = make_grid(layout)
    chunks = build_chunks(platform, spec, layout, config, pixel_mean=(0.5,) * 3, pixel_std=(0.5,) * 3)
    wrapped = wrap(config, chunks)
    optimizer = build_optimizer(config, platform, wrapped)
    micro_batches, results = config.global_batch_size // dp, []
    for workload in workloads:
        stream = None
        if grid.owns_loader:
            source = rows(spec, config.data.seq_len, images=workload == "images", seed=17 + grid.dp_rank)
            stream = itertools.cycle(itertools.islice(source, max(4, micro_batches)))
        feed = Feed(grid, platform, stream, micro_batches)
        log = MetricsLog(config, spec, grid, platform)
        for step in range(warm_up + timed):
            if step == warm_up:
                log = MetricsLog(config, spec, grid, platform)
                platform.synchronize()
                dist.barrier()
                log.mark = time.perf_counter()
            data = feed.next_step()
            set_learning_rates(optimizer, config, step)
            result = train_step(wrapped, optimizer, data.rows, grid, config.data.seq_len)
            log.add(data)
        platform.synchronize()
        numbers: dict[str, Any] = {"workload": workload, **log.write(warm_up + timed, result, 0.0)}
        results.append(numbers)
    for numbers in results:
        say(grid, json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in numbers.items()}))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
