"""The queue server's sense of time."""

from __future__ import annotations

import time


class ServedClock:
    """Seconds during which the server could listen: a turn counts at most one.

    So a server that was stopped, or waited for its disk, does not hold it against leases it could not hear about.
    """

    def __init__(self) -> None:
        self.now, self._last = 0.0, time.monotonic()

    def advance(self) -> float:
        last, self._last = self._last, time.monotonic()
        self.now += min(1.0, self._last - last)
        return self.now
