"""The tensor that autograd need not keep is found by what it is, not by its address alone."""

import weakref
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from megatron_vl.models.fused_layers import recompute_in_backward

SIDE = 300
"""Tensors of this many rows and columns are too large for an allocator's cache of small blocks."""


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    x, weight, other = (torch.randn(SIDE, SIDE, dtype=torch.float64) for _ in range(3))
    return x.requires_grad_(), weight.requires_grad_(), other


def test_released_tensor_and_its_flat_views_are_computed_again() -> None:
    x, weight, _ = _inputs()
    y, forward = x.exp(), Mock(wraps=torch.exp)
    with recompute_in_backward(y, forward, x.detach()):
        out = y @ weight + (y.view(SIDE, 1, SIDE) @ weight)[:, 0]
    out.sum().backward()
    assert forward.call_count == 2
    assert torch.allclose(weight.grad, 2 * x.detach().exp().sum(0)[:, None].expand(SIDE, SIDE))


@pytest.mark.parametrize("change", [Tensor.t, lambda y: y.mul_(2)], ids=["other order", "other values"])
def test_tensor_with_the_same_address_is_kept(change: Callable[[Tensor], Tensor]) -> None:
    """A transposed view also has the same number of elements and type."""
    x, weight, _ = _inputs()
    y = x.detach().exp()
    with recompute_in_backward(y, torch.exp, x.detach()):
        changed = change(y)
        out = changed @ weight
    out.sum().backward()
    assert torch.allclose(weight.grad, changed.sum(0)[:, None].expand(SIDE, SIDE))


def test_tensor_that_gets_the_memory_is_kept() -> None:
    """Here the caller drops the tensor within the context."""
    for _ in range(20):
        x, weight, other = _inputs()
        y = x.detach().exp()
        with recompute_in_backward(y, torch.exp, x.detach()):
            del y
            out = other.clone() @ weight
        out.sum().backward()
        assert torch.allclose(weight.grad, other.sum(0)[:, None].expand(SIDE, SIDE))


def test_released_tensor_is_freed_after_the_context() -> None:
    x, weight, _ = _inputs()
    y = x.detach().exp()
    reference = weakref.ref(y)
    with recompute_in_backward(y, torch.exp, x.detach()):
        out = y @ weight
    del y
    assert out.requires_grad and reference() is None
