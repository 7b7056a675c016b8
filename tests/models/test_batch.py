"""Rows and segments on a device."""

import pytest
import torch

from megatron_vl.models.batch import Segments


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
