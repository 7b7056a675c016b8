"""The loader of versions before streams: one Energon loader for each data-parallel rank, as they built it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset
from megatron.energon.errors import reraise_exception

from megatron_vl.config import DataConfig
from megatron_vl.data.loader import RowEncoder, build_loader
from megatron_vl.data.row import Row
from megatron_vl.data.state import to_json
from megatron_vl.spec.families import ModelSpec


class FormerLoader:
    """The rows of one rank, and its state as those versions saved it."""

    def __init__(self, data: DataConfig, spec: ModelSpec, hf: Path, rank: int = 0, ranks: int = 1) -> None:
        encoder = RowEncoder(data, spec, hf)
        encoder.shuffles = True
        config = WorkerConfig(
            rank=rank,
            world_size=ranks,
            num_workers=data.num_workers,
            seed_offset=data.seed,
            global_error_handler=reraise_exception,
        )
        order: dict[str, Any] = {"shuffle_over_epochs_multiplier": 1, "max_samples_per_sequence": 100}
        if not data.shuffle_buffer:
            order = {"shuffle_over_epochs_multiplier": None, "max_samples_per_sequence": None}
            order["parallel_shard_iters"] = 1
        dataset = get_train_dataset(
            data.path,
            split_part="train",
            shuffle_buffer_size=None,
            worker_config=config,
            task_encoder=encoder,
            batch_size=None,
            packing_buffer_size=data.packing_buffer if data.pack else 1,
            **order,
        )
        self.loader = get_savable_loader(
            dataset,
            checkpoint_every_sec=0,
            checkpoint_every_min_n_samples=1,
            n_checkpoints=4 * max(data.num_workers, 1) + 4,
            watchdog_timeout_seconds=None,
        )
        self.loader.pin_memory = False
        self.rows: Iterator[Row] | None = None

        now = build_loader(data, spec, hf, dp_rank=rank, dp_size=ranks).state_dict()["identity"]
        ranks_of_then = {"dp_rank": rank, "dp_size": ranks, "num_workers": data.num_workers}
        self.identity = {**now, "version": 2, **ranks_of_then}

    def __next__(self) -> Row:
        if self.rows is None:  # Energon asks processes for a state from here on
            self.rows = iter(self.loader)
        return next(self.rows)

    def state_dict(self) -> dict[str, Any]:
        return {"identity": self.identity, "energon": to_json(self.loader.save_state_rank())}

    def close(self) -> None:
        iterator = getattr(self.loader, "_iterator", None)
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
