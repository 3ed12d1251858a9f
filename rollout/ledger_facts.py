"""What happened to ordinals: the facts that the ledger produces and the journal keeps.

The ledger changes only by applying facts, so replaying them in order rebuilds it exactly. Each fact is small; the
payload of a group is not part of it (the journal keeps it beside the fact `Generated`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.types import Verdict


@dataclass(frozen=True, slots=True)
class Leased:
    """Leased((17, 18), attempts=(0, 0), holder="rollout-0", key="c1:5", version=3)."""

    ordinals: tuple[int, ...]
    attempts: tuple[int, ...]
    holder: str
    key: str
    version: int


@dataclass(frozen=True, slots=True)
class Returned:
    """Leases that ended without a group: expired or given back. `failed` counts towards the poison limit."""

    ordinals: tuple[int, ...]
    reason: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Generated:
    """Generated(17, attempt=0, n_tokens=96, oldest_version=4)."""

    ordinal: int
    attempt: int
    n_tokens: int
    oldest_version: int


@dataclass(frozen=True, slots=True)
class Judged:
    """One verdict per trajectory of the group."""

    ordinal: int
    verdicts: Sequence[Verdict]


@dataclass(frozen=True, slots=True)
class Taken:
    """Step `step` consists of these groups, in this order; said again when a restarted learner takes it again."""

    step: int
    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """The optimizer step `step` is done: version step + 1 exists."""

    step: int


@dataclass(frozen=True, slots=True)
class Released:
    """The weights of `version` are live in the engines: the slots of the steps before it are free."""

    version: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A durable checkpoint contains `step` and everything before it."""

    step: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Dropped((17,), "zero_signal")."""

    ordinals: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Rewound:
    """The learner restarted from the checkpoint of `version`; `key` names the restart, so that it happens once."""

    version: int
    key: str


@dataclass(frozen=True, slots=True)
class Draining:
    """No new ordinal is issued from here on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something the people who watch the run should know; it changes nothing in the ledger."""

    what: str
    detail: str


Fact = (
    Leased
    | Returned
    | Generated
    | Judged
    | Taken
    | Trained
    | Released
    | Committed
    | Dropped
    | Rewound
    | Draining
    | Noticed
)
