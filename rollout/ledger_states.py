"""The nouns of the ledger: the settings, the states of an ordinal, and what is remembered about one.

                 expired, given back
                  +--------------+
                  v              |
    (new) ---> ISSUED ------> LEASED ------> GENERATED ------> SCORED ------> TAKEN ------> TRAINED ------> COMMITTED
                  |              |               |               | ^            |             |
                  +--------------+---------------+---------------+ +------------+-------------+
                                 v                                  the learner restarted from an older checkpoint
                          DROPPED(reason)  <--- also from TAKEN, when the learner skips a group

COMMITTED and DROPPED are final: the ledger forgets the ordinal and only counts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from rollout.errors import ConfigError
from rollout.types import Verdict


class State(StrEnum):
    """Where an ordinal is. See the picture above."""

    ISSUED = "issued"  # it has had a lease and lost it; the next lease takes it before any new ordinal
    LEASED = "leased"
    GENERATED = "generated"
    SCORED = "scored"
    TAKEN = "taken"
    TRAINED = "trained"
    COMMITTED = "committed"
    DROPPED = "dropped"

    __hash__ = str.__hash__  # states are counted at every move, and an Enum's own way to hash is not in C


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Everything that decides what the ledger allows.

    LedgerSettings(groups_per_step=8, group_size=8, bound=2, max_steps=24) gives 24 slots and a window of 24.
    """

    groups_per_step: int  # P
    group_size: int  # G
    bound: int = 2  # S
    mode: Literal["wait", "drop"] = "wait"
    window: float = 1.0  # share of the slots that may still be unfinished ahead of a group that is taken
    max_steps: int | None = None
    lease_s: float = 120.0
    group_deadline_s: float = 600.0
    max_attempts: int = 3  # failed leases of one ordinal before it is poison
    min_viable: int = 2  # scored answers a group needs
    zero_signal: Literal["drop", "train"] = "drop"
    metric: str | None = None  # the verdict component that shows signal; None: the verdict's value
    max_refills: int = 10  # times P groups a step may lose for want of signal before it trains without

    def __post_init__(self) -> None:
        rules: list[tuple[str, bool, str]] = [
            ("groups_per_step", self.groups_per_step >= 1, "at least 1"),
            ("group_size", self.group_size >= 1, "at least 1"),
            ("bound", self.bound >= 0, "0 or more"),
            ("mode", self.mode in ("wait", "drop"), "'wait' or 'drop'"),
            ("window", 0.0 < self.window <= 1.0, "above 0 and at most 1"),
            ("max_steps", self.max_steps is None or self.max_steps >= 0, "0 or more, or None"),
            ("lease_s", self.lease_s > 0, "above 0"),
            ("group_deadline_s", self.group_deadline_s > 0, "above 0"),
            ("max_attempts", self.max_attempts >= 1, "at least 1"),
            ("min_viable", 1 <= self.min_viable <= self.group_size, f"1 to group_size ({self.group_size})"),
            ("zero_signal", self.zero_signal in ("drop", "train"), "'drop' or 'train'"),
            ("max_refills", self.max_refills >= 0, "0 or more"),
        ]
        for name, holds, wanted in rules:
            if not holds:
                raise ConfigError(f"LedgerSettings.{name} is {getattr(self, name)!r}; it must be {wanted}")

    @property
    def slots(self) -> int:
        """Groups between lease and release: (S + 1) * P."""
        return (self.bound + 1) * self.groups_per_step

    @property
    def reorder(self) -> int:
        """W: a group may be taken while fewer than this many groups ahead of it are unfinished."""
        return max(1, int(self.window * self.slots))


@dataclass(slots=True)
class Entry:
    """One live ordinal.

    Entry(17, SCORED, attempt=0, holder="rollout-0", version=4, n_tokens=96, verdicts=(Scored(1.0), Scored(0.0)))
    """

    ordinal: int
    state: State
    attempt: int  # which lease this is, 0 for the first
    holder: str
    key: str  # the request that obtained the lease: asking again with it gives the same lease
    version: int  # the version that was live at the lease; once generated, that of the oldest token
    failures: int = 0
    n_tokens: int = 0
    verdicts: Sequence[Verdict] = ()
    step: int | None = None  # the step it was taken for; a learner restart keeps it
    # Not journalled: clocks start afresh when the server does.
    deadline: float = 0.0  # of the lease, or of the scoring lease
    first_lease: float = math.inf
    scorer: str = ""
    scoring_key: str = ""
    scoring_failures: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """The right and duty to generate one ordinal: submit it, give it back, or lose it at the deadline.

    Lease(ordinal=17, attempt=0, deadline=120.0), the deadline in seconds from now, renewed by heartbeats.
    """

    ordinal: int
    attempt: int
    deadline: float
