"""Every error a caller of Headrace may want to catch.

A bad rollout is data (a `Status`, a `Verdict`); a bad program or a bad input is one of these.
All of them survive pickling (Ray moves them between processes) because they carry only strings
and numbers, and all of their messages name the thing, the value received and the remedy.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(HeadraceError):
    """The user's input cannot work. `headrace` prints the message on one line and exits with code 2."""


class WireError(HeadraceError):
    """Bytes from outside do not form a valid message. Names the field that is wrong."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(field, detail)
        self.field, self.detail = field, detail

    def __str__(self) -> str:
        return f"{self.field}: {self.detail}"


class LedgerError(HeadraceError):
    """A transition was refused and nothing changed. Names the ordinal, its state and the transition."""

    def __init__(self, ordinal: int, state: str, transition: str, detail: str = "") -> None:
        super().__init__(ordinal, state, transition, detail)
        self.ordinal, self.state, self.transition, self.detail = ordinal, state, transition, detail

    def __str__(self) -> str:
        tail = f": {self.detail}" if self.detail else ""
        return f"ordinal {self.ordinal} is {self.state}, cannot {self.transition}{tail}"


class Drained(HeadraceError):
    """Nothing is left to lease or to score: the run is ending. Says why; not a failure."""


class QueueError(HeadraceError):
    """The queue server refused a request for a reason that is not about one ordinal."""


class DeadlineError(HeadraceError):
    """Something did not happen in time. Names what was awaited, from whom, and for how long."""

    def __init__(self, awaited: str, waited_s: float, detail: str = "") -> None:
        super().__init__(awaited, waited_s, detail)
        self.awaited, self.waited_s, self.detail = awaited, waited_s, detail

    def __str__(self) -> str:
        tail = f" ({self.detail})" if self.detail else ""
        return f"waited {self.waited_s:.1f} s for {self.awaited}{tail}"


class WeightError(HeadraceError):
    """What an engine received is not what the learner sent; the engine still serves the old version."""


class NoEngine(WeightError):
    """No engine is left that could serve the version; it can be published as soon as one is there."""


class EngineError(HeadraceError):
    """The inference engine died, or its weights are in no known state; it must be replaced or updated."""


class Quarantined(HeadraceError):
    """The learner does not trust what this engine serves; it serves nothing any more. Says why."""


class DivergedError(HeadraceError):
    """Learning cannot go on: gradients not finite for several steps in a row, or ranks whose weights differ."""
