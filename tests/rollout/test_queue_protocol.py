"""Proves that blobs come back as they were, few frames carry many small ones, and wrong cuts are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.errors import WireError
from rollout.queue_protocol import JOIN_BELOW, JOINED, Request, read_reply, reply_frames, request_frames
from rollout.wire import pack

SMALL, LARGE = b"ab" * 50, b"x" * JOIN_BELOW


@pytest.mark.parametrize(
    ("blobs", "frames"),
    [
        ([], 0),
        ([SMALL], 1),
        ([LARGE], 1),
        ([SMALL, b"", SMALL[:1]], 1),
        ([SMALL, LARGE, LARGE, b"", SMALL], 4),
        ([SMALL] * (2 * JOINED + 1), 3),
    ],
)
def test_blobs_come_back_and_small_ones_share_frames(blobs: list[bytes], frames: int) -> None:
    sent = request_frames("submit", "c", 1, "a", {"groups": []}, blobs)
    assert len(sent) == 1 + frames
    assert [bytes(b) for b in Request(sent).blobs] == blobs
    sent = reply_frames(1, "e", {"groups": []}, blobs)
    assert len(sent) == 1 + frames
    assert [bytes(b) for b in read_reply(sent)[3]] == blobs


def test_a_small_blob_does_not_keep_its_frame_alive() -> None:
    header, frame = request_frames("submit", "c", 1, "a", {}, [SMALL, SMALL])
    assert all(type(b) is bytes for b in Request([header, memoryview(frame)]).blobs)


WRONG = (None, 5, [], [[2, 3], None], [[2, 2]], [[2, 4]], [[-1, 6]], [[2.0, 3]], [[True, 4]], [["2", 3]], [{"2": 3}])


@pytest.mark.parametrize("cuts", [*WRONG, [[0] * 9999]])
def test_wrong_cuts_are_refused(cuts: Any) -> None:
    header = {"schema": 1, "op": "submit", "client": "c", "seq": 1, "holder": "a", "cuts": cuts}
    with pytest.raises(WireError, match=r"request\.cuts"):
        Request([pack(header), b"12345"])
