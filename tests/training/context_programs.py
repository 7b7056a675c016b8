"""What the ranks of :mod:`tests.training.test_context_parallel` run."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vl.data.packing.assemble_row import TokenizedSample, pack_row
from megatron_vl.models import build
from megatron_vl.models.attention import PackedAttention, PackedRow
from megatron_vl.parallel.process_grid import init_distributed
from megatron_vl.platform import get_platform
from megatron_vl.training.optimizer import set_learning_rates
from megatron_vl.training.rows.batch_broadcast import BatchBroadcast
from megatron_vl.training.state.checkpoint import load_checkpoint
from megatron_vl.training.trainer import Trainer
from megatron_vl.weights.run_folder import step_dir_path
from toolkit.parity.case import ParityCase, build_case, draw_samples, pack_step

from .decoupled_programs import saved_tensors

ROWS = [["image", "image"], ["mixed"], ["text", "short_text"], ["video", "text"]]
SEQ_LEN = 192
MOVES: dict[str, dict[str, Any]] = {
    "DP4": {},
    "CP2 x DP2": {"cp": 2},
    "CP2 x TP2": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "CP4": {"cp": 4, "decoupled": True},
    "DP4 again": {},
}
"""Layouts of four ranks, in the order in which a run moves through them."""


def moved(
    hf: str,
    weights: str,
    folder: str,
    layouts: dict[str, dict[str, Any]] = MOVES,
    lora: dict[str, Any] | None = None,
) -> dict[str, list[str]]:
    """Trains and saves in the first layout; loads and saves in each of the others.

    Args:
        lora: fields of :class:`~megatron_vl.config.LoraConfig`; None: the model itself is trained.

    Returns, on rank 0, the names of the tensors that differ from those of the first checkpoint, by layout.
    """
    platform = get_platform("cpu")
    torch.set_num_threads(1)
    init_distributed(platform)
    different: dict[str, list[str]] = {}
    first: dict[str, Tensor] = {}
    for number, (name, layout) in enumerate(layouts.items()):
        case = ParityCase(name, hf, weights, [], seq_len=SEQ_LEN, lora=lora or {}, **layout)
        live = build_case(case, platform)
        if number == 0:
            for step in range(2):
                data = pack_step(live, draw_samples(ROWS, live.spec, step))
                set_learning_rates(live.optimizer, live.config, step)
                live.train_step(data)
        else:
            parts = {"model_chunks": live.model_chunks, "optimizer": live.optimizer}
            place = {"spec": live.spec, "grid": live.grid, "layout": live.layout}
            source = step_dir_path(Path(folder) / str(number - 1), 2)
            load_checkpoint(source, **parts, **place)

        saved = saved_tensors(live, Path(folder) / str(number))
        first = first or saved
        changed = [key for key, tensor in saved.items() if not torch.equal(tensor, first[key])]
        different[name] = changed + sorted(saved.keys() ^ first.keys())
    return different | {"compared": [str(len(first))]}


def losses_beside_others(hf: str, weights: str) -> dict[str, Any]:
    """Losses of conversations when one conversation beside them changes, in several layouts.

    Returns, by layout, on rank 0: whether the losses of each conversation stayed the same bit for bit.
    """
    platform = get_platform("cpu")
    torch.set_num_threads(1)
    init_distributed(platform)
    out: dict[str, Any] = {}
    for name, layout in {"CP2 x DP2": {"cp": 2}, "CP4": {"cp": 4}}.items():
        live = build_case(
            ParityCase(name, hf, weights, [], seq_len=SEQ_LEN, optimizer=False, **layout), platform
        )
        samples = draw_samples([["short_text", "image", "word", "text", "image"]], live.spec, 0)[0]
        before = _token_losses(live, samples)

        changed = draw_samples([["image"]], live.spec, 7)[0][0]
        after = _token_losses(live, [samples[0], changed, *samples[2:]])

        bounds = torch.tensor([0, *(len(sample) for sample in samples)]).cumsum(0).tolist()
        spans = zip(bounds[:-1], bounds[1:], strict=True)
        out[name] = [torch.equal(before[first:end], after[first:end]) for first, end in spans]
    return out


def checked_and_computed_heads(hf: str, weights: str) -> dict[str, Any]:
    """Query heads for each key/value head, by layout: with which kernels are checked before they are built
    in, and which attention gets. Where they are wrong on one rank, the CPU's are taken; "said" is printed."""
    platform = get_platform("cpu")
    torch.set_num_threads(1)
    init_distributed(platform)
    checked: list[int] = []

    def wrong_on_rank_1(heads_per_group: int, *_: Any) -> bool:
        checked.append(heads_per_group)
        return dist.get_rank() != 1

    build.flash_attention_is_right = wrong_on_rank_1
    choose = build.choose_backend
    build.choose_backend = lambda *args, causal, tries_flash_attention=True, **more: (
        "flash_attn" if causal and tries_flash_attention else choose(*args, causal=causal, **more)
    )
    found: dict[str, Any] = {}
    said = io.StringIO()
    layouts: dict[str, dict[str, Any]] = {
        "DP4": {},
        "TP4": {"tp": 4, "sequence_parallel": True},
        "CP4": {"cp": 4},
        "CP2 x TP2": {"cp": 2, "tp": 2, "sequence_parallel": True},
    }
    for name, layout in layouts.items():
        case = ParityCase(name, hf, weights, [], seq_len=SEQ_LEN, optimizer=False, **layout)
        with contextlib.redirect_stdout(said):
            live = build_case(case, platform)
        computed: list[int] = []
        for module in live.model_chunks[0].modules():
            if isinstance(module, PackedAttention) and module.causal:
                module.backend_function = _counting_heads(module.backend_function, computed)
        samples = draw_samples([["text"]] * live.grid.dp, live.spec, 0)
        live.model_chunks[0].module(pack_step(live, samples).rows[0])
        assert len({*computed}) == 1
        found[name] = [checked[-1], computed[0]]
    return found | {"said": said.getvalue().splitlines()}


def _counting_heads(backend: Any, computed: list[int]) -> Any:
    def attend(query: Tensor, key: Tensor, *args: Any) -> Tensor:
        computed.append(query.shape[1] // key.shape[1])
        return backend(query, key, *args)

    return attend


class HostReads(TorchDispatchMode):
    """Records operators for whose result the host would have to wait for a GPU.

    ``tolist`` of a CPU tensor is not among them, because it is no operator there.
    """

    READING = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
    )

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        has_data_shape = name == "aten.repeat_interleave" and not (kwargs or {}).get("output_size")
        if name.partition(".")[2] in self.READING or has_data_shape:
            self.operators.append(name)
        result = func(*args, **(kwargs or {}))
        return self._indexed_by_mask(name, args, result)

    def _indexed_by_mask(self, name: str, args: Any, result: Any) -> Any:
        """Indexing by a mask counts its true elements, like ``nonzero``."""
        if name == "aten.index" and any(index is not None and index.dtype == torch.bool for index in args[1]):
            self.operators.append("aten.nonzero")
        return result


def host_reads(hf: str, weights: str, platform_name: str = "cpu") -> list[str]:
    """What the passes of a row under CP2 read on the host. On a GPU, a read raises an error instead."""
    platform = get_platform(platform_name)
    torch.set_num_threads(1)
    init_distributed(platform)
    dtype = "bfloat16" if platform_name == "cuda" else "float32"
    case = ParityCase("CP2", hf, weights, [], seq_len=SEQ_LEN, optimizer=False, cp=2, dtype=dtype)
    live = build_case(case, platform)
    data = pack_step(live, draw_samples([["image", "word", "text", "video"]], live.spec, 0))

    live.model_chunks[0].module(data.rows[0]).sum().backward()  # kernels are compiled at the first use
    with HostReads() as host_read_log:
        if platform_name == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        live.model_chunks[0].module(data.rows[0]).sum().backward()
        if platform_name == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return host_read_log.operators


def saved_by_attention(hf: str, weights: str) -> int:
    """Number of float32 elements that a rank's attention under CP2 keeps for its backward pass.

    The output counts, because the linear that follows keeps it. Views of one tensor count once.
    """
    platform = get_platform("cpu")
    torch.set_num_threads(1)
    init_distributed(platform)
    case = ParityCase("CP2", hf, weights, [], seq_len=SEQ_LEN, optimizer=False, cp=2)
    live = build_case(case, platform)
    [row] = pack_step(live, draw_samples([["text"]], live.spec, 0)).rows
    attention = next(
        module
        for module in live.model_chunks[0].modules()
        if isinstance(module, PackedAttention) and module.causal
    )

    kept_tensors: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept_tensors[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    language = live.spec.language
    head_counts = (language.num_heads, language.num_kv_heads, language.num_kv_heads)
    inputs = []
    for heads in head_counts:
        inputs.append(torch.randn(len(row.tokens), 1, heads, language.head_dim, requires_grad=True))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keep(attention(*inputs, packed_seq_params=PackedRow(full_segments=row.segments, shard=row.shard)))
    return sum(tensor.untyped_storage().nbytes() // 4 for tensor in kept_tensors.values())


def _token_losses(live: Trainer, samples: list[TokenizedSample]) -> Tensor:
    """The losses of all tokens of a row that every replica gets, [S]."""
    row = pack_row(samples, live.spec, SEQ_LEN)
    row.loss_mask = torch.ones_like(row.loss_mask)
    platform = get_platform("cpu")
    given = iter([row]) if live.grid.owns_loader else None
    [mine] = BatchBroadcast(live.grid, platform, given, 1, vision_spec=live.spec.vision).next_batch().rows
    with torch.no_grad():
        losses = live.model_chunks[0].module(mine).view(-1)

    by_rank = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, losses)
    return torch.cat(by_rank[: live.grid.cp])
