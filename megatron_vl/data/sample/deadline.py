"""A limit on the time that one sample may take."""

from __future__ import annotations

import time

SAMPLE_TIMEOUT_S = 300.0
"""Seconds that reading a sample, making tokens of its text and decoding its media may each take."""


class SampleTimeoutError(Exception):
    """A sample took too long."""


class SampleDeadline:
    """Ends work that takes too long. The work calls :meth:`check_time` between its steps.

    Args:
        timeout_seconds: seconds from now on; 0: no limit.
    """

    def __init__(self, timeout_seconds: float = 0.0) -> None:
        self.timeout_seconds = timeout_seconds
        self._end_time = time.monotonic() + timeout_seconds

    def check_time(self) -> None:
        """Raises :class:`SampleTimeoutError` if the time is up."""
        if self.timeout_seconds and time.monotonic() > self._end_time:
            raise SampleTimeoutError(f"it took longer than {self.timeout_seconds:g} s")


NO_DEADLINE = SampleDeadline()
