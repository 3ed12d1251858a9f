"""Proves that groups survive the wire bit for bit, without copies, and that bytes from outside only raise WireError."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import WireError
from rollout.types import Failed, Group, Scored, Status, TimedOut, Verdict
from rollout.versions import VersionSpan
from rollout.wire import ONE_FRAME, decode_group, encode_group, pack, read_header, unpack
from rollout.wire_header import careful_header, usual_header
from rollout.wire_verdicts import read_verdicts, read_verdicts_table, verdicts_row, verdicts_table
from tests.rollout.queue_samples import group, same, trajectory


def full_group() -> Group:
    """Every field in use."""
    extras = {
        "entropy": np.linspace(0, 1, 5, dtype=np.float32),
        "routed_experts": np.arange(5 * 4 * 2, dtype=np.int16).reshape(5, 4, 2),
        "top_logprobs": np.ones((5, 3), np.float16),
        "kept_mass": np.ones(5, np.float64),
    }
    spans = (VersionSpan(3, 0, 2), VersionSpan(5, 2, 5))
    notes = {"turns": [0, 3], "tools": [{"name": "calc", "ok": True}], "images": ["a.png"]}
    answers = (
        trajectory(5, 0, versions=spans, extras=extras, notes=notes, verdict=Scored(0.5, {"exact": 0.5})),
        trajectory(3, 4, status=Status.TRUNCATED, verdict=TimedOut(2.0)),
        trajectory(0, verdict=Failed("raised", "KeyError")),
    )
    return Group(17, np.arange(4, dtype=np.int32), answers, 2)


def test_every_field_survives() -> None:
    header, frames = encode_group(full_group())
    assert same(decode_group(header, frames), full_group())


def test_the_header_is_enough_for_a_server() -> None:
    header, frames = encode_group(full_group())
    read = read_header(header)
    assert (read.ordinal, read.attempt, read.lengths, read.oldest_version) == (17, 2, (5, 3, 0), 3)
    assert read.body == sum(map(len, frames))
    assert read.all_judged == (Scored(0.5, {"exact": 0.5}), TimedOut(2.0), Failed("raised", "KeyError"))


def test_large_groups_travel_without_copies() -> None:
    big = group(0, lengths=(ONE_FRAME, ONE_FRAME))
    header, frames = encode_group(big)
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), big.trajectories[0].token_ids)
    back = decode_group(header, frames)
    assert np.shares_memory(back.trajectories[1].behaviour_logprobs, np.frombuffer(frames[4], np.uint8))
    assert same(back, big)


@given(st.lists(st.integers(0, 200), min_size=0, max_size=6))
@settings(deadline=None, max_examples=60)
def test_any_cut_into_frames_reads_the_same(cuts: list[int]) -> None:
    header, frames = encode_group(full_group())
    body = b"".join(frames)
    edges = [0, *sorted(c for c in cuts if c < len(body)), len(body)]
    pieces = [body[a:b] for a, b in pairwise(edges)]
    assert same(decode_group(header, pieces), full_group())


def test_token_ids_alone_make_a_group_for_a_scorer() -> None:
    header, frames = encode_group(full_group())
    end = read_header(header).tokens_end
    part = decode_group(header, [b"".join(frames)[:end]])
    assert part.trajectories[0].token_ids.tolist() == full_group().trajectories[0].token_ids.tolist()
    assert part.trajectories[0].extras == {}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": np.zeros(3, np.int64)}, "trajectories[0].token_ids"),
        ({"loss_mask": np.ones(2, np.bool_)}, "trajectories[0]"),
        ({"behaviour_logprobs": np.zeros(4, np.float32)}, "trajectories[0]"),
        ({"behaviour_logprobs": np.array([0, np.nan, 0], np.float32)}, "trajectories[0].behaviour_logprobs"),
        ({"versions": ()}, "trajectories[0]"),
        ({"extras": {"x": np.zeros(2, np.float32)}}, "trajectories[0]"),
        ({"extras": {"x": np.zeros(3, object)}}, "trajectories[0].extras['x']"),
    ],
)
def test_a_bad_trajectory_is_refused_before_it_leaves(change: dict[str, object], field: str) -> None:
    good = group(1)
    bad = replace(good, trajectories=(replace(good.trajectories[0], **change), good.trajectories[1]))
    with pytest.raises(WireError) as caught:
        encode_group(bad)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("schema", 2, "group.schema"),
        ("ordinal", -1, "group.ordinal"),
        ("ordinal", True, "group.ordinal"),
        ("ordinal", None, "group.ordinal"),
        ("lengths", [], "group.lengths"),
        ("lengths", [3, 5, 1], "group.statuses"),
        ("lengths", [3, 6], "group.body"),
        ("lengths", [0, 5], "group.lengths[0]"),
        ("statuses", [0, 9], "group.statuses[1]"),
        ("versions", [[0, 3], [1, 2, 0, 5]], "group.versions[1]"),
        ("versions", [[0, 3], "x"], "group.versions[1]"),
        ("versions", [[0, 3]], "group.versions"),
        ("versions", -1, "group.versions"),
        ("versions", True, "group.versions"),
        ("prompt", 4, "group.body"),
        ("body", 1 << 60, "group.body"),
        ("extras", [[0, "x", "|O8", []]], "group.extras[0].dtype"),
        ("extras", [[7, "x", "<f4", []]], "group.extras[0].trajectory"),
        ("extras", [[0, "x", "<f4", [0]]], "group.extras[0].shape[0]"),
        ("verdicts", ["mixed", [["scored", float("nan"), {}], None]], "group.verdicts[0]"),
        ("verdicts", ["mixed", [["scored", 1.0, {"a": float("inf")}], None]], "group.verdicts[0]"),
        ("verdicts", ["mixed", [["scored", 1.0, {}]]], "group.verdicts"),
        ("verdicts", ["scored", [1.0, float("nan")], {}], "group.verdicts"),
        ("verdicts", ["scored", [1.0, 2.0], {"a": [1.0]}], "group.verdicts"),
        ("verdicts", ["scored", [1.0], {}], "group.verdicts"),
        ("versions", [[0, 3], [1 << 63, 5]], "group.versions[1]"),
        ("notes", [], "group.notes"),
    ],
)
def test_a_bad_header_names_its_field(key: str, value: object, field: str) -> None:
    header, _ = encode_group(group(1))
    with pytest.raises(WireError) as caught:
        read_header(pack({**unpack(header), key: value}))
    assert caught.value.field == field


def test_arrays_are_checked_when_they_are_opened() -> None:
    header, frames = encode_group(group(1))
    body = bytearray(b"".join(frames))
    with pytest.raises(WireError, match=r"group\.frames: 10 bytes"):
        decode_group(header, [body[:10]])
    at = read_header(header).tokens_end
    with pytest.raises(WireError, match="not finite"):
        decode_group(header, [bytes(body[:at]) + np.float32(np.nan).tobytes() + bytes(body[at + 4 :])])
    with pytest.raises(WireError, match="neither 0 nor 1"):
        decode_group(header, [bytes(body[:-1]) + b"\x07"])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80trailing",
        msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
        msgpack.packb({1: 2}),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000 + b"\x00",
        b"\xdf\x7f\xff\xff\xff" + b"\x00" * 40,
    ],
)
def test_hostile_bytes_only_raise_wire_errors(data: bytes) -> None:
    with pytest.raises(WireError):
        read_header(data)


def test_deep_nesting_is_refused() -> None:
    deep: object = 0
    for _ in range(40):
        deep = [deep]
    header, _ = encode_group(group(1))
    with pytest.raises(WireError, match="nested too deeply"):
        read_header(pack({**unpack(header), "notes": {"0": deep}}))


def test_verdicts_survive_in_rows_and_in_columns() -> None:
    for verdicts in (
        (Scored(1.0, {"a": 0.5, "b": 1.0}), Scored(0.0, {"a": 0.25, "b": -1.0})),
        (Scored(1.0), Scored(2.0)),
        (Scored(1.0, {"a": 0.5}), Scored(0.0)),
        (Scored(1.0), Failed("raised", "x"), TimedOut(3.0)),
        (),
    ):
        assert read_verdicts(unpack(pack(verdicts_row(verdicts))), "v") == verdicts


def test_verdict_rows_are_checked() -> None:
    assert read_verdicts(["mixed", [["failed", "nan", ""]]], "v") == (Failed("nan", ""),)
    for row in (["scored", 1, {}], ["scored", 1.0, {"a": "b"}], ["scored", 1.0, {b"a": 1.0}], ["dropped"], [], 3, None):
        with pytest.raises(WireError):
            read_verdicts(["mixed", [row]], "v")
    for row in (["scored", 1.0], ["scored", ["x"], {}], ["scored", [1.0], {"a": ["b"]}], [[]], {}, None):
        with pytest.raises(WireError):
            read_verdicts(row, "v")


SCORES = (Scored(1.0, {"exact": 1.0, "length": 0.5}), Scored(0.0, {"exact": 0.0, "length": 0.25}))
OTHERS = (Scored(0.5, {"exact": 0.0}), Scored(0.5, {"exact": 1.0}))
FAILED = (Failed("raised", "x"), TimedOut(2.0))


@pytest.mark.parametrize(
    ("groups", "kind"),
    [
        ([], "each"),
        ([SCORES], "scored"),
        ([SCORES, SCORES[::-1]], "scored"),
        ([SCORES, SCORES[:1]], "each"),
        ([SCORES, OTHERS], "each"),
        ([SCORES, FAILED], "each"),
    ],
)
def test_verdicts_of_many_groups_travel_end_to_end(groups: list[tuple[Verdict, ...]], kind: str) -> None:
    table = unpack(pack(verdicts_table(groups)))
    assert table[0] == kind
    assert [tuple(g) for g in read_verdicts_table(table, len(groups), "v")] == groups
    assert verdicts_table(read_verdicts_table(table, len(groups), "v")) == table
    with pytest.raises(WireError, match="v"):
        read_verdicts_table(table, len(groups) + 1, "v")


@pytest.mark.parametrize(
    "table",
    [
        None,
        ["scored", 0, [], {}],
        ["scored", 2, [1.0, 2.0, 3.0], {}],
        ["scored", 2, [1.0, float("inf")], {}],
        ["scored", 2, [1.0, 2.0], {"a": [1.0]}],
        ["scored", 2, [1.0, 2.0], {5: [1.0, 2.0]}],
        ["scored", -1, [1.0, 2.0], {}],
        ["each", [["mixed", [None, None]]]],
        ["each", [["scored", ["x", 1.0], {}]]],
    ],
)
def test_wrong_tables_of_verdicts_are_refused(table: object) -> None:
    with pytest.raises(WireError, match="v"):
        read_verdicts_table(table, 1, "v")


@pytest.mark.parametrize("key", [*unpack(encode_group(group(1))[0]), "other"])
def test_the_quick_look_at_a_header_and_the_careful_one_agree(key: str) -> None:
    """Whatever the quick one lets through, the careful one reads the same."""
    plain = unpack(encode_group(group(1))[0])
    assert usual_header(plain) == careful_header(plain)
    nasty: list[object] = [None, True, False, -1, 0, 1, 2, 163, 1 << 33, 1.0, "", "x", [], {}, [0], [3, 5], [3, 0]]
    nasty += [[True, 5], [0, 1], [0, 3], [2, 2], [4, 4], [3.0, 5], [-3, 11], [[0, 3], [0, 5]], {"0": {}}]
    for value in nasty:
        changed = {**plain, key: value}
        quick = usual_header(changed)
        assert quick is None or quick == careful_header(changed)


def test_arrays_that_do_not_lie_in_one_piece_travel_like_others() -> None:
    whole = np.arange(12, dtype=np.int32)
    apart = replace(group(1).trajectories[0], token_ids=whole[::4])
    back = decode_group(*encode_group(replace(group(1), trajectories=(apart, group(1).trajectories[1]))))
    assert back.trajectories[0].token_ids.tolist() == [0, 4, 8]
    assert back.columns.lengths == (3, 5) and back.columns.token_ids.tolist()[:3] == [0, 4, 8]
