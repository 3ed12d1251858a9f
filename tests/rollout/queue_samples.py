"""Groups and small ledgers for the queue's tests."""

from __future__ import annotations

import numpy as np

from rollout.ledger import Ledger
from rollout.ledger_states import LedgerSettings
from rollout.types import Group, Scored, Status, Trajectory, Verdict
from rollout.versions import VersionSpan


def trajectory(length: int, version: int = 0, first: int = 0, **fields: object) -> Trajectory:
    spans = (VersionSpan(version, 0, length),) if length else ()
    made: dict[str, object] = {
        "token_ids": np.arange(first, first + length, dtype=np.int32),
        "loss_mask": np.ones(length, np.bool_),
        "behaviour_logprobs": np.linspace(-2, 0, length, dtype=np.float32),
        "versions": spans,
        "status": Status.FINISHED if length else Status.FAILED,
    }
    return Trajectory(**{**made, **fields})  # type: ignore[arg-type]


def group(ordinal: int, attempt: int = 0, version: int = 0, lengths: tuple[int, ...] = (3, 5)) -> Group:
    """Token ids start at the ordinal, so that a group shows whose it is."""
    answers = tuple(trajectory(n, version, ordinal) for n in lengths)
    return Group(ordinal, np.array([ordinal, 1, 2], np.int32), answers, attempt)


def same(a: Group, b: Group) -> bool:
    """Equal in every array, dtype and field."""
    if (a.ordinal, a.attempt, len(a.trajectories)) != (b.ordinal, b.attempt, len(b.trajectories)):
        return False
    pairs = [(a.prompt_ids, b.prompt_ids)]
    for s, t in zip(a.trajectories, b.trajectories, strict=True):
        if (s.versions, s.status, s.verdict, s.extras.keys(), dict(s.notes)) != (
            *(t.versions, t.status, t.verdict, t.extras.keys(), dict(t.notes)),
        ):
            return False
        pairs += [(s.token_ids, t.token_ids), (s.loss_mask, t.loss_mask), (s.behaviour_logprobs, t.behaviour_logprobs)]
        pairs += [(s.extras[k], t.extras[k]) for k in s.extras]
    return all(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs)


def settings(**changes: object) -> LedgerSettings:
    """P = 2, G = 2, S = 1: four slots."""
    plain: dict[str, object] = {"groups_per_step": 2, "group_size": 2, "bound": 1, "min_viable": 1}
    return LedgerSettings(**{**plain, **changes})  # type: ignore[arg-type]


GOOD: tuple[Verdict, ...] = (Scored(1.0), Scored(0.0))
FLAT: tuple[Verdict, ...] = (Scored(1.0), Scored(1.0))


def produce(
    ledger: Ledger, ordinal: int, verdicts: tuple[Verdict, ...] | None = GOOD, version: int | None = None
) -> None:
    """Submit a leased ordinal and, unless verdicts is None, score it."""
    entry = ledger.entries[ordinal]
    made = entry.version if version is None else version
    ledger.submit(ordinal, entry.attempt, entry.holder, 8, made, now=0.0)
    if verdicts is not None:
        ledger.score(ordinal, verdicts, now=0.0)


def learn(ledger: Ledger, step: int, commit: bool = False) -> tuple[int, ...]:
    """Take, train and release one step; returns its groups."""
    taken = ledger.take(step, now=0.0)
    assert isinstance(taken, tuple), taken
    ledger.trained(step, step + 1)
    ledger.release(step + 1)
    if commit:
        ledger.commit(step)
    return taken
