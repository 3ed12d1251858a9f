"""What the ledger states, as records of the journal, in order.

facts               those that follow each other share one record
a sent group        a record of its own, with its header and arrays
placed groups       those of one message share one record that says where they lie
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.journal import Journal
from rollout.journal_records import group_record, placed_record
from rollout.ledger_facts import Fact, Generated
from rollout.payloads import Payloads
from rollout.queue_intake import Placed, Sent
from rollout.wire_facts import fact_row


class Records:
    """`add` as often as there is something to say, then `close` before a flush."""

    def __init__(self, journal: Journal, payloads: Payloads) -> None:
        self.journal, self.payloads = journal, payloads
        self._rows: list[list[Any]] = []  # facts waiting to become one record
        self._placed: list[tuple[Generated, Placed]] = []

    def add(self, facts: Sequence[Fact], groups: Mapping[int, Sent | Placed], client: str) -> None:
        """`groups` holds those that the facts say were generated, all from `client`."""
        for fact in facts:
            if not isinstance(fact, Generated):
                self._close_placed(client)
                self._rows.append(fact_row(fact))
                continue
            self.close()
            group = groups[fact.ordinal]
            if isinstance(group, Placed):
                self._placed.append((fact, group))
            else:
                ref = self.journal.append(group_record(group.header, fact), group.frames)
                self.payloads.put(fact.ordinal, ref, group.brief.tokens_end, group.header, group.frames)
        self._close_placed(client)

    def close(self) -> None:
        """All that was added is in the journal's batch."""
        if self._rows:
            self.journal.append_facts(self._rows)
            self._rows = []

    def _close_placed(self, client: str) -> None:
        if not self._placed:
            return
        facts, places = [fact for fact, _ in self._placed], [g.place for _, g in self._placed]
        told = self.journal.append_placed(placed_record(facts, places), places, client).segment
        for _, g in self._placed:
            self.payloads.put_placed(g.brief.ordinal, g.place, g.brief.tokens_end, told)
        self._placed = []
