"""The queue in figures: what `stats`, `gauges`, the live view and `headrace why` show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
