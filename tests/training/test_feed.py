"""A row arrives as it was on its owner, whatever buffers it travelled in."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import call
from tests.training.programs import failures_of_loaders, rows_over_the_wire

pytestmark = pytest.mark.ranks


def test_a_row_arrives_as_it_left(tiny_checkpoint) -> None:
    """Checks pictures and text, and a row of text alone with its stand-in for a picture."""
    different = call(
        rows_over_the_wire, hf=str(tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32))
    )
    assert different == [[[], True], [[], True]]


def test_a_loader_that_ends_or_fails_is_named_by_its_replica() -> None:
    ended, failed = call(failures_of_loaders)
    assert (
        ended
        == "data-parallel rank 3: the loader failed: the data set ended; training needs a repeating loader"
    )
    assert failed == "data-parallel rank 3: the loader failed: OSError: train-000007.tar: Input/output error"
