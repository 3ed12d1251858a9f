"""When a component only fails: take it out of service, look again after a while, and say both.

    closed --(k failures in a row)--> open --(rest_s)--> one trial --ok--> closed
                                        ^-------fails, rest doubles------'

Pure: time comes in as an argument. Not thread-safe: the owner holds a lock.
"""

from __future__ import annotations

from collections import deque

REST_S, LONGEST_REST_S = 10.0, 300.0


class Breaker:
    """admit() before a sample, record() after it; record says "opened", "closed" or None."""

    def __init__(self, limit: int, rest_s: float = REST_S) -> None:
        self.limit, self.first_rest_s = limit, rest_s
        self.failures = 0  # in a row
        self._rest_s = rest_s
        self._open_until: float | None = None
        self._on_trial = False

    @property
    def is_open(self) -> bool:
        return self._open_until is not None

    def admit(self, now: float) -> bool:
        """May this sample be computed? While open: one trial after each rest."""
        if self._open_until is None:
            return True
        if self._on_trial or now < self._open_until:
            return False
        self._on_trial = True
        return True

    def record(self, ok: bool, now: float) -> str | None:
        """The outcome of an admitted sample."""
        if ok:
            was_open = self.is_open
            self.failures, self._rest_s, self._open_until, self._on_trial = 0, self.first_rest_s, None, False
            return "closed" if was_open else None
        self.failures += 1
        if self._on_trial:
            self._on_trial = False
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
            self._open_until = now + self._rest_s
        elif not self.is_open and self.failures >= self.limit:
            self._open_until = now + self._rest_s
            return "opened"
        return None


class ErrorBudget:
    """True from record() once each time the failed share of the last `window` samples passes `share`."""

    def __init__(self, window: int = 256, share: float = 0.1) -> None:
        self.window, self.share = window, share
        self._recent: deque[bool] = deque(maxlen=window)
        self._spent = False

    @property
    def failed_share(self) -> float:
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    def record(self, ok: bool) -> bool:
        self._recent.append(not ok)
        spent = len(self._recent) == self.window and self.failed_share > self.share
        crossed, self._spent = spent and not self._spent, spent
        return crossed
