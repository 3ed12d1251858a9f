"""Proves that what a real journal holds comes out as one row per answer, the same in JSONL and Parquet, by version,
status and verdict, and that errors of rewards have no reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.export_rollouts import Filters, export_rollouts
from launch.run_dir import RunDirectory
from rollout.errors import ConfigError
from rollout.journal import read_groups
from rollout.queue_client import QueueClient
from rollout.queue_server import QueueServer
from rollout.types import Failed, Scored, Status, TimedOut, Verdict
from tests.rollout.queue_samples import group, settings

VERDICTS: dict[int, tuple[Verdict, ...]] = {
    0: (Scored(1.0, {"exact": 1.0}), Scored(0.0, {"exact": 0.0})),
    1: (Failed("raised", "ZeroDivisionError"), TimedOut(5.0)),
}


@pytest.fixture
def run(make_run: Any) -> RunDirectory:
    """Groups 0 by version 0 and scored, 1 by version 1 with failed rewards, 2 by version 2 and not judged."""
    made: RunDirectory = make_run()
    with QueueServer(settings(min_viable=1), made.journal) as server, QueueClient(server.endpoint, "all") as client:
        for lease in client.lease(3, wait_s=10.0):
            lengths = (3, 0 if lease.ordinal == 2 else 5)
            client.submit([group(lease.ordinal, lease.attempt, lease.ordinal, lengths)])
            if lease.ordinal in VERDICTS:
                client.score({lease.ordinal: VERDICTS[lease.ordinal]})
    return made


def rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    import pyarrow.parquet as pq

    return [{**row, "components": dict(row["components"])} for row in pq.read_table(path).to_pylist()]


def test_groups_are_chosen_by_the_version_verdict_and_status_of_every_answer(run: RunDirectory) -> None:
    def chosen(**filters: Any) -> list[int]:
        return [g.ordinal for g in read_groups(run.journal, **filters)]

    assert chosen() == [0, 1, 2] and chosen(versions={0, 2}) == [0, 2]
    assert [chosen(verdict=v) for v in ("scored", "failed", "none")] == [[0], [], [2]]
    assert chosen(status=Status.FINISHED) == [0, 1] and chosen(status=Status.FINISHED, verdict="scored") == [0]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_one_row_per_answer(run: RunDirectory, kind: str) -> None:
    path, groups, answers = export_rollouts(run, kind, Filters())
    assert (path, groups, answers) == (run.path / f"rollouts.{kind}", 3, 6)
    made = rows(path)
    assert [(r["ordinal"], r["answer"]) for r in made] == [(o, n) for o in range(3) for n in range(2)]
    assert made[0] == {
        "ordinal": 0,
        "attempt": 0,
        "answer": 0,
        "prompt_ids": [0, 1, 2],
        "token_ids": [0, 1, 2],
        "logprobs": [-2.0, -1.0, 0.0],
        "loss_mask": [True, True, True],
        "versions": [[0, 0, 3]],
        "status": "finished",
        "verdict": "scored",
        "reward": 1.0,
        "components": {"exact": 1.0},
        "detail": "",
    }
    assert [(r["verdict"], r["reward"], r["detail"]) for r in made[2:4]] == [
        ("failed", None, "raised: ZeroDivisionError"),
        ("timed_out", None, "after 5 s"),
    ]
    assert (made[4]["verdict"], made[5]["status"], made[5]["token_ids"]) == ("none", "failed", [])
    assert [p.name for p in run.path.glob(".*making")] == []


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(min_version=1), [(1, 0), (1, 1), (2, 0)]),
        (Filters(max_version=0), [(0, 0), (0, 1), (2, 1)]),  # an answer without tokens counts as version 0
        (Filters(status="failed"), [(2, 1)]),
        (Filters(verdict="scored"), [(0, 0), (0, 1)]),
        (Filters(verdict="timed_out"), [(1, 1)]),
        (Filters(min_version=1, verdict="none"), [(2, 0)]),
    ],
)
def test_filters(run: RunDirectory, filters: Filters, expected: list[tuple[int, int]]) -> None:
    path, _, answers = export_rollouts(run, "jsonl", filters)
    assert [(r["ordinal"], r["answer"]) for r in rows(path)] == expected and answers == len(expected)


def test_a_name_that_says_no_format_or_no_place_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    for out, expected in (("rollouts.csv", "must be jsonl, parquet"), (f"{tmp_path}/none/x.jsonl", "is no directory")):
        with pytest.raises(ConfigError, match=expected):
            export_rollouts(run, out, Filters())
