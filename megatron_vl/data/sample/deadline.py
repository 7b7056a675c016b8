"""A limit on the time that one sample may take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SAMPLE_TIMEOUT_S = 300.0
"""Seconds that reading a sample, making tokens of its text and decoding its media may each take."""

_end_time: ContextVar[float] = ContextVar("end_time", default=float("inf"))


class SampleTimeoutError(Exception):
    """A sample took too long."""


@contextmanager
def limited_time() -> Iterator[None]:
    """Ends work on a sample that takes too long: the work calls :func:`check_time` between its steps."""
    token = _end_time.set(time.monotonic() + SAMPLE_TIMEOUT_S)
    try:
        yield
    finally:
        _end_time.reset(token)


def check_time() -> None:
    """Raises :class:`SampleTimeoutError` if the time is up."""
    if time.monotonic() > _end_time.get():
        raise SampleTimeoutError(f"it took longer than {SAMPLE_TIMEOUT_S:g} s")
