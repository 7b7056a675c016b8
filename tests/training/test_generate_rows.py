"""Rows of new tokens, whose length differs from that of the training, and padding for FP8."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_vl.models.batch import Segments
from megatron_vl.parallel import tp_overlap
from megatron_vl.platform import get_platform
from megatron_vl.training.generate import _new_token_row

SEQUENCE_PARALLEL = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
LENGTHS: dict[str, tuple[dict[str, Any], int]] = {
    "as they are": ({}, 3),
    "sequence parallel": (SEQUENCE_PARALLEL, 4),
    "tensorwise": (FP8, 128),
    "delayed": ({**FP8, "fp8_recipe": "delayed"}, 128),
    "blockwise": ({**FP8, "fp8_recipe": "blockwise"}, 128),
    "sequence parallel, tensorwise": ({**FP8, **SEQUENCE_PARALLEL}, 256),
}


@pytest.mark.parametrize(("settings", "length"), LENGTHS.values(), ids=LENGTHS)
def test_rows_are_filled_up_to_what_products_take(settings: dict[str, Any], length: int) -> None:
    """Transformer Engine refuses FP8 products whose number of rows is not a multiple of 8."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        bf16=True,
        params_dtype=torch.bfloat16,
        **settings,
    )
    grid: Any = SimpleNamespace(tp=config.tensor_model_parallel_size)
    chunk: Any = SimpleNamespace(config=config)
    row = _new_token_row(chunk, grid, get_platform("cpu"), [(7, 30), (8, 40), (9, 50)])
    assert row.tokens.tolist() == [7, 8, 9] + [0] * (length - 3)
    assert row.position_ids.shape == (3, length)
    assert row.num_real_tokens == 3
    assert row.segments.cu_seqlens.tolist() == [0, length]


def test_collectives_beside_products_pause() -> None:
    """Collectives of the forward pass pause in the linears that have them, and resume afterwards, also
    after an error."""

    def linear(**flags: bool) -> nn.Module:
        module = nn.Linear(1, 1)
        for name, value in flags.items():
            setattr(module, name, value)
        return module

    column = linear(ub_overlap_ag_fprop=True, ub_overlap_rs_fprop=False, ub_overlap_rs_dgrad=True)
    row = linear(ub_overlap_ag_fprop=False, ub_overlap_rs_fprop=True)
    plain = linear()

    def flags() -> list[bool]:
        return [
            column.ub_overlap_ag_fprop,
            column.ub_overlap_rs_fprop,
            row.ub_overlap_ag_fprop,
            row.ub_overlap_rs_fprop,
        ]  # type: ignore[list-item]

    with (
        pytest.raises(KeyError),
        tp_overlap.pause_overlap([nn.Sequential(column, plain), nn.Sequential(row)]),
    ):
        assert flags() == [False] * 4
        assert column.ub_overlap_rs_dgrad
        raise KeyError
    assert flags() == [True, False, False, True]
    assert not hasattr(plain, "ub_overlap_ag_fprop")


@pytest.mark.parametrize(
    ("padding", "bounds"),
    [
        (0, [0, 64, 100, 100]),
        (60, [0, 64, 100, 160]),
        (124, [0, 64, 100, 164, 224]),
        (128, [0, 64, 100, 164, 228]),
    ],
)
def test_padding_is_cut_like_the_longest_segment(padding: int, bounds: list[int]) -> None:
    """One longer segment would make the window kernel take larger tiles for all windows."""
    segments = Segments(torch.tensor([0, 64, 100], dtype=torch.int32), 64)
    padded = segments.with_padding_segments(100 + padding, padding)
    assert padded.cu_seqlens.tolist() == bounds and padded.cu_seqlens.dtype == torch.int32
    assert padded.max_seqlen == 64
