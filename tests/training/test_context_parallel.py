"""Context parallelism beyond the parity table: how rows are cut, checkpoints, conversations, refusals."""

import contextlib
import io
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vl.data.packing.assemble_row import pack_row
from megatron_vl.models import build
from megatron_vl.models.context_parallel import heads_for_tokens
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.layout import attention_heads, make_layout, read_layout
from megatron_vl.spec.tensors import LayoutError
from megatron_vl.training.rows.row_message import make_device_row, serialize_row, unpack_tensors
from megatron_vl.training.rows.row_shards import RowSharding, complete_part, cut_text
from tests.parity.cases import THREE_HEADS
from tests.support.ranks import in_ranks
from tests.support.tiny_trainer import differences, load, save, trainer_of
from tests.support.tiny_trainer import train as train_steps
from tests.tiny import TWO_LAYERS, tiny_checkpoint
from toolkit.parity.case import draw_samples, pack_step

ROWS = [["image", "image"], ["mixed"], ["text", "short_text"], ["video", "text"]]
"""Kinds of samples in each row of a step."""


def test_parts_of_a_row_depend_on_no_value_of_the_device() -> None:
    """Tensors without data stand for those on a GPU."""
    spec = read_spec(tiny_checkpoint("qwen2_5_vl", dtype=torch.float32))
    sharding = RowSharding(4, 2, spec.vision, tower_is_decoupled=False)
    [samples] = draw_samples([["image", "text", "video"]], spec, 0)
    header, buffers = serialize_row(pack_row(samples, spec, 512), sharding)
    tensors = unpack_tensors(header, buffers)
    without_data = {name: tensor.to("meta") for name, tensor in tensors.items()}
    for rank in range(4):
        part, same = (
            complete_part(make_device_row(header, cut_text(header, given, rank)), header, rank)
            for given in (tensors, without_data)
        )
        assert part.shard.route == same.shard.route


MOVES: dict[str, dict[str, Any]] = {
    "DP4": {},
    "CP2 x TP2": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "CP4": {"cp": 4, "decoupled": True},
    "DP4 again": {},
}
"""Layouts of four ranks, in the order in which a run moves through them."""


def check_moves(hf: Path, folder: Path, layouts: dict[str, dict[str, Any]], **fields: Any) -> dict:
    """Trains and saves in the first layout; loads and saves in each of the others, bit for bit."""
    first: dict[str, Tensor] = {}
    for number, (name, layout) in enumerate(layouts.items()):
        trainer = trainer_of(hf, **fields, **layout)
        if number == 0:
            train_steps(trainer, ROWS, range(2))
        else:
            load(trainer, folder / str(number - 1))
        saved = save(trainer, folder / str(number))
        first = first or saved
        assert differences(saved, first) == [], name
    assert len(first) > 50 or dist.get_rank()
    return first


@pytest.mark.parametrize(("family", "sizes"), [("qwen3_5", TWO_LAYERS)], ids=["qwen3_5"])
@in_ranks(4)
def test_checkpoint_moves_between_layouts_bit_for_bit(hf, family: str, sizes: dict, tmp_path: Path) -> None:
    """Weights, master weights, moments and step counts, from DP4 through context parallelism and back."""
    check_moves(hf, tmp_path, MOVES)


class HostReads(TorchDispatchMode):
    """Records operators for whose result the host would wait; ``tolist`` of a CPU tensor is none."""

    READING = "_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive".split()

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        has_data_shape = name == "aten.repeat_interleave" and not (kwargs or {}).get("output_size")
        if name.partition(".")[2] in self.READING or has_data_shape:
            self.operators.append(name)
        result = func(*args, **(kwargs or {}))
        # Indexing by a mask counts its true elements, like `nonzero`.
        if name == "aten.index" and any(index is not None and index.dtype == torch.bool for index in args[1]):
            self.operators.append("aten.nonzero")
        return result


@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen2_5_vl", {}), ("qwen3_vl", THREE_HEADS), ("qwen3_5", {})]
)
@in_ranks(2)
def test_passes_read_no_number_of_the_device_on_the_host(hf, family: str, sizes: dict[str, int]) -> None:
    """Forward and backward passes of CP2 ask for no number and no shape that depends on numbers."""
    trainer = trainer_of(hf, optimizer=False, cp=2)
    step_batch = pack_step(trainer, draw_samples([["image", "word", "text", "video"]], trainer.spec, 0))
    with HostReads() as host_reads:
        trainer.model_chunks[0].module(step_batch.rows[0]).sum().backward()
    assert host_reads.operators == []


@pytest.mark.parametrize(
    ("tp", "cp", "key_ranks"), [(1, 4, 1), (1, 8, 2), (1, 3, 3), (2, 4, 2), (4, 7, 1), (4, 2, 2)]
)
def test_heads_are_exchanged_as_far_as_they_divide(tp: int, cp: int, key_ranks: int) -> None:
    """Of 28 query heads and 4 key/value heads."""
    spec = read_spec("tests/hf_configs/Qwen2.5-VL-7B-Instruct.json")
    layout = make_layout(spec, tp=tp, cp=cp)
    assert (layout.key_ranks, layout.head_ranks) == (key_ranks, cp // key_ranks)
    assert read_layout(spec, layout.as_dict()) == layout and layout.replica_ranks == tp * cp


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_heads_that_are_checked_are_those_that_a_rank_computes(tp: int, monkeypatch) -> None:
    """For every released size, as the exchange returns them, also with TP above the key/value heads."""
    monkeypatch.setattr("megatron_vl.models.context_parallel.all_to_all", lambda group, heads: heads)
    layouts, changed = 0, set()
    for path, cp in itertools.product(sorted(Path("tests/hf_configs").glob("*.json")), (1, 2, 3, 4, 6, 8)):
        spec = read_spec(path)
        language = spec.language
        try:
            layout = make_layout(spec, tp=tp, cp=cp)
        except LayoutError:
            continue
        rank_heads = (language.num_heads // tp, *[max(1, language.num_kv_heads // tp)] * 2)
        tensors = [torch.empty(layout.head_ranks, heads, 8, device="meta") for heads in rank_heads]
        if layout.head_ranks > 1:
            tensors = list(heads_for_tokens(*tensors, SimpleNamespace(size=lambda n=layout.head_ranks: n)))
        heads = attention_heads(spec, layout)
        assert heads == (tensors[0].shape[1], tensors[1].shape[1]), (path.stem, tp, cp)
        layouts += 1
        if heads[0] * language.num_kv_heads != heads[1] * language.num_heads:
            changed.add((path.stem, cp))
    assert layouts > 20
    assert tp > 2 or ("Qwen3.5-35B-A3B", 4) in changed


@pytest.mark.parametrize("family", ["qwen3_vl"])
@in_ranks(4)
def test_kernels_are_checked_with_the_heads_that_attention_gets(hf, family: str) -> None:
    """Two of four query heads share a key/value head, and where these are cut further, fewer do. Where
    FlashAttention-4 is wrong on one rank, all take the next kernels, and a line says so."""
    checked: list[int] = []

    def is_wrong_on_rank_1(heads_per_group: int, *_: Any) -> bool:
        checked.append(heads_per_group)
        return dist.get_rank() != 1

    choose = build.choose_backend
    build.flash_attention_is_right = is_wrong_on_rank_1
    build.choose_backend = lambda *args, causal, tries_flash_attention=True, **more: (
        "flash_attn" if causal and tries_flash_attention else choose(*args, causal=causal, **more)
    )
    for layout, heads_per_group in (({}, 2), ({"tp": 4, "sequence_parallel": True}, 1), ({"cp": 4}, 1)):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            trainer_of(hf, optimizer=False, **layout)
        if dist.get_rank() == 0:
            assert "FlashAttention-4 computes wrong gradients for heads of" in out.getvalue()
            assert out.getvalue().endswith("the language model takes sdpa instead\n")
        assert checked.pop() == heads_per_group and not checked, layout


def test_linear_attention_is_shared_by_at_most_sixteen_ranks() -> None:
    spec = read_spec("tests/hf_configs/Qwen3.5-397B-A17B.json")
    assert make_layout(spec, cp=16).replica_ranks == 16
    with pytest.raises(LayoutError, match=r"^cp=32: qwen3_5_moe has linear attention, .* at most 16$"):
        make_layout(spec, cp=32)
