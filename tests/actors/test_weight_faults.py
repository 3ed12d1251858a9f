"""Proves: every fault of the matrix, on the gloo and the store plane, is caught before a token is served by anything
but proven weights, is named, and is recovered from or ended within the deadline; docs/weights.md says just that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.weight_faults import cases, run_all, table

DOCS = Path(__file__).parents[2] / "docs" / "weights.md"
BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->"


@pytest.mark.timeout(600)
async def test_every_fault_is_caught_named_and_ended() -> None:
    seen = await run_all(cases())
    assert not [s for s in seen if s.wrong]
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    told, after = rest.split(END)
    if os.environ.get("HEADRACE_WRITE_DOCS"):
        DOCS.write_text(f"{before}{BEGIN}{table(seen)}\n{END}{after}")
        return
    assert told.strip() == table(seen), "the table is out of date: run this test with HEADRACE_WRITE_DOCS=1"
