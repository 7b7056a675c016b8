"""A small part of the fuzzing of the data path; the whole: ``python -m tests.fuzz.data --count 5000``."""

import pytest

from .data import fuzz_loader, fuzz_tool

pytestmark = pytest.mark.full


def test_mutated_records_and_samples(tmp_path):
    tool = fuzz_tool(300, seed=7, folder=tmp_path, workers=2)
    assert tool["used"] > 30 and len(tool) > 9
    loader = fuzz_loader(100, seed=7, out=tmp_path / "out")
    assert loader["used"] > 10 and len(loader) > 4
