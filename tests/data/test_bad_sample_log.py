"""At most ten samples of a reason are logged, whatever the number of the loader's processes."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vl.data import row_encoder
from megatron_vl.data.row_encoder import MAX_LOGGED_PER_REASON, RowEncoder


@pytest.mark.parametrize(("num_workers", "lines"), [(0, 10), (2, 5), (8, 1), (64, 1)])
def test_processes_share_the_logged_samples(
    num_workers: int, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = SimpleNamespace(id=1, num_workers=num_workers) if num_workers else None
    monkeypatch.setattr(row_encoder, "get_worker_info", lambda: worker)
    encoder: Any = RowEncoder.__new__(RowEncoder)
    encoder.logged_samples, encoder.source_names = {}, ()
    with caplog.at_level(logging.WARNING):
        for number in (*range(25), *range(25)):
            sample: Any = SimpleNamespace(shard_name="train.tar", key=str(number))
            encoder._log_bad_sample(sample, "too long", "9 tokens")
    assert len(caplog.messages) == lines <= MAX_LOGGED_PER_REASON
    process_text = " by loader process 1" if num_workers else ""
    assert caplog.messages[-1].endswith(f"(further ones are counted, not logged{process_text})")
    assert sum("further ones" in line for line in caplog.messages) == 1
