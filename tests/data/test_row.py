"""Checks which tokens of a row get logits."""

import pytest
import torch

from megatron_vl.data.packing.training_row import LOSS_INDEX_MULTIPLE, loss_index


@pytest.mark.parametrize(("seq_len", "share"), [(1000, 0.0), (1024, 0.001), (1000, 0.8)])
def test_loss_index_has_every_loss_token(seq_len: int, share: float) -> None:
    for seed in range(20):
        mask = (torch.rand(seq_len, generator=torch.Generator().manual_seed(seed)) < share).float()
        index = loss_index(mask)
        assert index is not None and index.dtype == torch.int64
        assert (index.diff() > 0).all() and 0 <= index[0] and index[-1] < seq_len
        assert mask[index].sum() == mask.sum()
        assert len(index) % LOSS_INDEX_MULTIPLE == 0
        assert len(index) - max(1, mask.sum()) < LOSS_INDEX_MULTIPLE


@pytest.mark.parametrize("trained", [1024, 1000, 897])
def test_loss_index_of_a_row_of_loss_tokens_is_none(trained: int) -> None:
    mask = torch.zeros(1024)
    mask[:trained] = 1.0
    assert loss_index(mask) is None
    mask[896:] = 0.0
    assert loss_index(mask).tolist() == list(range(896))


def test_loss_index_of_a_short_row_is_none() -> None:
    assert loss_index(torch.zeros(LOSS_INDEX_MULTIPLE)) is None
