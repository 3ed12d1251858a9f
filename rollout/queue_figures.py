"""The queue in figures and events: what `stats`, `gauges`, the live view and `headrace why` show."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollout.ledger_facts import Draining, Dropped, Fact, Noticed, Rewound

if TYPE_CHECKING:
    from rollout.queue_core import QueueCore


def describe(core: QueueCore) -> dict[str, Any]:
    """Everything worth showing, as plain values."""
    ledger = core.ledger
    return {
        "counts": ledger.balance(),
        "conserved": ledger.conserved,
        "dropped_by_reason": dict(ledger.dropped),
        "slots": {"all": ledger.settings.slots, "used": ledger.occupied},
        "next_step": ledger.next_step,
        "version": ledger.version,
        "live_version": ledger.live,
        "committed_steps": ledger.committed_steps,
        "draining": ledger.ending,
        "ended": ledger.ended,
        "poison": list(ledger.poison),
        "staleness": core.staleness,
        "bytes": {"in_memory": core.payloads.bytes_waiting, "limit": core.payloads.max_bytes},
        "journal": {"bytes": core.journal.bytes_written, "syncs": core.journal.syncs},
    }


TOLD = (Dropped, Noticed, Draining, Rewound)  # facts that are worth an event


def tell(event: Callable[..., object], fact: Fact) -> None:
    """The event that a fact is worth: event("dropped", ordinals=[17], reason="stale")."""
    match fact:
        case Dropped(ordinals, reason):
            event("dropped", ordinals=list(ordinals), reason=reason)
        case Noticed(what, detail):
            event("alarm", what=what, detail=detail)
        case Draining(reason):
            event("draining", reason=reason)
        case Rewound(version):
            event("learner_restarted", version=version)
