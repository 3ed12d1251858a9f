"""Proves the numbers that the live view, `status` and the report share: curves, paces, counts, and words for them."""

from __future__ import annotations

import pytest

from launch.progress import Progress, described, duration, percent, spark


def test_a_held_out_score_said_twice_counts_once_and_curves_are_in_order() -> None:
    p = Progress(steps=8)
    p.event({"event": "evaluation", "version": 8, "name": "held_out", "score": 0.5})
    p.event({"event": "evaluation", "version": 0, "name": "held_out", "score": 0.1})
    p.step({"step": 8, "version": 8, "eval/held_out/reward": 0.5})
    assert p.held_out == {"held_out": [(0, 0.1), (8, 0.5)]}


def test_pace_and_time_left_come_from_the_clocks_of_the_rows() -> None:
    p = Progress(steps=10)
    assert p.left_s() is None
    for version in (1, 2, 3):
        p.step({"version": version, "time_s": 100.0 + 4 * version})
    assert (p.version, p.fraction, p.step_s(), p.left_s()) == (3, 0.3, 4.0, 28.0)


def test_series_leave_out_what_a_row_does_not_have() -> None:
    p = Progress(steps=3)
    for row in ({"version": 1, "x": 1.0}, {"version": 2}, {"version": 3, "x": None}):
        p.step(row)
    assert p.series("x") == [(1, 1.0)] and p.latest("x") == 1.0 and p.mean("y") is None


def test_drops_deaths_and_alarms_are_counted_by_reason() -> None:
    p = Progress(steps=3)
    for event in (
        {"event": "dropped", "reason": "zero_signal", "ordinals": [1, 2]},
        {"event": "dropped", "reason": "zero_signal", "count": 3},
        {"event": "role_died", "role": "rollout-0"},
        {"event": "alarm", "what": "canary", "detail": "0.3"},
    ):
        p.event(event)
    assert (p.dropped, p.deaths, p.alarms) == ({"zero_signal": 5}, {"rollout-0": 1}, ["alarm canary 0.3"])


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (duration(75), "1:15"),
        (duration(4000), "1:06:40"),
        (duration(None), "?"),
        (percent(0.256), "26 %"),
        (percent(None), "-"),
        (spark([0, 1, 2]), "▁▅█"),
        (spark([3, 3]), "▁▁"),
        (spark([]), ""),
        (
            described({"time": 1, "event": "x", "a": 0.123456, "b": list(range(9))}),
            "x a=0.1235 b=[0, 1, 2, 3, 4, ... 9 in all]",
        ),
    ],
)
def test_words(made: str, expected: str) -> None:
    assert made == expected
