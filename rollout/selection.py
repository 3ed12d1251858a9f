"""Which groups a step consumes, and which rank trains which of them. Pure functions over ledger entries.

`choose` looks at the groups that belong to no step yet, oldest tokens first. It takes the first P that are scored,
passing over fewer than W unfinished ones, and then asks: can what is left behind still be trained in time? A group of
version v must be in step v + S at the latest, and each step holds P. If not, the step waits for the ones that are in a
hurry (mode "wait"), or goes on and lets them grow too old and be dropped (mode "drop").
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollout.ledger_states import Entry, LedgerSettings, State
from rollout.types import Scored, Verdict
from rollout.verdict_columns import ScoreColumns

SIGNAL = 1e-6  # verdicts closer together than this carry no signal


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a step cannot be taken yet: Waiting("step 5 has 3 of 8 scored groups; ordinal 17 is leased to rollout-0")."""

    why: str

    @classmethod
    def for_more(cls, step: int, untaken: Collection[Entry], s: LedgerSettings) -> Waiting:
        ready = sum(e.state is State.SCORED for e in untaken)
        unfinished = [e for e in untaken if e.state is not State.SCORED]
        detail = f"; oldest unfinished: {_describe(unfinished[:3])}" if unfinished else "; nothing is being generated"
        return cls(f"step {step} has {ready} of {s.groups_per_step} scored groups{detail}")


def choose(step: int, untaken: Iterable[Entry], live: int, s: LedgerSettings) -> tuple[int, ...] | Waiting:
    """The ordinals of `step`, oldest tokens first, or why it must wait."""

    def birth(e: Entry) -> tuple[int, int]:
        return (live if e.state is State.ISSUED else e.version, e.ordinal)

    in_order = sorted(untaken, key=birth)
    picked: list[Entry] = []
    passed: list[Entry] = []
    for entry in in_order:
        if len(picked) == s.groups_per_step or len(passed) >= s.reorder:
            break
        (picked if entry.state is State.SCORED else passed).append(entry)
    if len(picked) < s.groups_per_step:
        return Waiting(f"step {step} takes groups in order and is {len(passed)} behind: {_describe(passed[:3])}")
    if s.mode == "wait" and (urgent := _too_late(step, in_order, picked, s)):
        return Waiting(f"step {step} must include groups that would grow too old: {_describe(urgent[:3])}")
    return tuple(e.ordinal for e in picked)


def _too_late(step: int, in_order: Sequence[Entry], picked: Sequence[Entry], s: LedgerSettings) -> list[Entry]:
    """The unfinished groups that could no longer be trained in time if `picked` became step `step`."""
    taken = {e.ordinal for e in picked}
    left = [e for e in in_order if e.ordinal not in taken and e.state is not State.ISSUED]
    urgent: list[Entry] = []
    for later in range(s.bound + 1):  # groups due by step + later must fit into `later` further steps
        due = [e for e in left if e.version + s.bound <= step + later]
        if len(due) > later * s.groups_per_step:
            urgent = due
            break
    return [e for e in urgent if e.state is not State.SCORED] or urgent


def forgotten(
    entries: Iterable[Entry],
    client: str,
    beat: int,
    holds: Mapping[int, int],
    scores: Collection[int],
    asks: Collection[int],
) -> list[Entry]:
    """Entries leased to a client which, when it sent its heartbeat number `beat`, did not know so and never will.

    It got them by a request made before that beat, which it no longer `asks` for, and it names them neither among the
    leases it `holds` nor among those it `scores`: a request or an answer was doubled, late or lost on the way.
    """

    prefix = f"{client}:"

    def unknown(e: Entry) -> bool:
        key = e.key if e.state is State.LEASED else e.scoring_key if e.state is State.GENERATED else ""
        if not key.startswith(prefix) or (seq := int(key[len(prefix) :])) >= beat or seq in asks:
            return False
        return holds.get(e.ordinal) != e.attempt if e.state is State.LEASED else e.ordinal not in scores

    return [e for e in entries if (e.scoring_key or e.key).startswith(prefix) and unknown(e)]


def _describe(entries: Iterable[Entry]) -> str:
    def one(e: Entry) -> str:
        who = e.holder if e.state is State.LEASED else e.scorer if e.state is State.GENERATED else ""
        return f"ordinal {e.ordinal} is {e.state}" + (f" ({who})" if who else "")

    return ", ".join(map(one, entries))


def shares(tokens: Mapping[int, int], world: int) -> list[tuple[int, ...]]:
    """Deal groups {ordinal: tokens} to ranks: the largest first, each to the rank with the fewest tokens so far.

    shares({1: 90, 2: 50, 3: 40}, world=2) == [(1,), (2, 3)]
    """
    if world == 1:
        return [tuple(tokens)]
    dealt: list[list[int]] = [[] for _ in range(world)]
    load = [0] * world
    for ordinal in sorted(tokens, key=lambda o: (-tokens[o], o)):
        rank = min(range(world), key=lambda r: (load[r], len(dealt[r]), r))
        dealt[rank].append(ordinal)
        load[rank] += tokens[ordinal]
    order = {o: i for i, o in enumerate(tokens)}
    return [tuple(sorted(part, key=order.__getitem__)) for part in dealt]


def n_scored(verdicts: Sequence[Verdict]) -> int:
    return len(verdicts) if isinstance(verdicts, ScoreColumns) else sum(isinstance(v, Scored) for v in verdicts)


def has_signal(verdicts: Sequence[Verdict], metric: str | None) -> bool:
    """Whether the scored answers differ: in `metric` if it is named, else in value. One answer alone always counts."""
    if isinstance(verdicts, ScoreColumns):
        values = verdicts.column(metric)
    else:
        scores = [v for v in verdicts if isinstance(v, Scored)]
        values = [v.components.get(metric, v.value) if metric else v.value for v in scores]
    return len(values) < 2 or max(values) - min(values) > SIGNAL
