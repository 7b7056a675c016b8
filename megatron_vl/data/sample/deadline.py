"""A limit on the time that one sample may take."""

from __future__ import annotations

import time


class OutOfTimeError(Exception):
    """A sample took longer than ``data.sample_timeout_s``."""


class Deadline:
    """Ends work that takes too long. Whoever works calls :meth:`check` between its steps.

    Args:
        seconds: from now; 0: no limit.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        """Raises :class:`OutOfTimeError` if the time is up."""
        if self.seconds and time.monotonic() > self._end:
            raise OutOfTimeError(f"it took longer than data.sample_timeout_s {self.seconds:g}")


UNLIMITED = Deadline()
