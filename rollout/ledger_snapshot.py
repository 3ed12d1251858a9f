"""The whole ledger as one plain value, and back: what each journal segment opens with."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rollout.errors import ConfigError
from rollout.ledger import Ledger
from rollout.ledger_states import Entry, LedgerSettings, State
from rollout.wire_verdicts import read_verdicts, verdicts_row

_FIXED = ("groups_per_step", "group_size")  # a journal can only be continued with these as they were
_PLAIN = ("issued", "next_step", "version", "live", "committed_steps", "draining", "noticed")


def snapshot(ledger: Ledger) -> dict[str, Any]:
    """Everything but the clocks."""
    return {
        "settings": {name: getattr(ledger.settings, name) for name in _FIXED},
        **{name: getattr(ledger, name) for name in _PLAIN},
        "plan": [[step, list(ordinals)] for step, ordinals in ledger.plan.items()],
        "unreleased": [[step, n] for step, n in ledger.unreleased.items()],
        "committed": ledger.counts[State.COMMITTED],
        "dropped": dict(ledger.dropped),
        "refilled": dict(ledger.refilled),
        "rewinds": list(ledger.rewinds),
        "poison": list(ledger.poison),
        "entries": [_entry_row(e) for e in ledger.entries.values()],
    }


def restore(settings: LedgerSettings, value: dict[str, Any], kind: type[Ledger] = Ledger) -> Ledger:
    """A ledger equal to the one that `snapshot` saw. Raises ConfigError if the run's shape has changed."""
    for name in _FIXED:
        was, now = value["settings"][name], getattr(settings, name)
        if was != now:
            raise ConfigError(
                f"{name} is {now}, but the journal was written with {was}; restore it or use a new run dir"
            )
    ledger = kind(settings)
    for name in _PLAIN:
        setattr(ledger, name, value[name])
    ledger.plan = {step: tuple(ordinals) for step, ordinals in value["plan"]}
    ledger.unreleased = dict(value["unreleased"])
    ledger.dropped, ledger.refilled = Counter(value["dropped"]), Counter(value["refilled"])
    ledger.rewinds = list(value["rewinds"])
    ledger.poison.extend(value["poison"])
    ledger.counts[State.COMMITTED] = value["committed"]
    for row in value["entries"]:
        entry = _read_entry(row)
        ledger.entries[entry.ordinal] = entry
        ledger.counts[entry.state] += 1
        if entry.step is None:
            ledger.untaken[entry.ordinal] = entry
    return ledger


def _entry_row(e: Entry) -> list[Any]:
    verdicts = verdicts_row(e.verdicts)
    return [e.ordinal, str(e.state), e.attempt, e.holder, e.key, e.version, e.failures, e.n_tokens, verdicts, e.step]


def _read_entry(row: list[Any]) -> Entry:
    ordinal, state, attempt, holder, key, version, failures, n_tokens, verdicts, step = row
    judged = read_verdicts(verdicts, "snapshot.verdicts")
    return Entry(ordinal, State(state), attempt, holder, key, version, failures, n_tokens, judged, step)
