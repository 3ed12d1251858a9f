"""Proves the whole loop with a learner of two ranks, on two cores: ranks share one, the engine has the other.

Killed whole in the middle and resumed: every ordinal trained once, each by one rank; ranks hold the same weights (a
checkpoint refuses to be made otherwise); the checkpoint and the export are those of both.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from learner import checkpoint
from rollout.audit import audit
from rollout.event_log import read_lines
from tests.loop_runs import Run, kill_whole, wait_until

STEPS, GROUPS = 6, 8

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_train_disjoint_shares_and_resume(tmp_path: Path, tiny_llama: Path, stage: int) -> None:
    from actors.prompts_data import write

    write("letters", tmp_path / "letters.jsonl")
    settings = [f"run.steps={STEPS}", "checkpoint.every=2", "evaluate.every=0"]
    ranks = [f"topology.learner.{s}" for s in ("ranks=2", "cpus=0.5", f"zero_stage={stage}")]
    run = Run(tmp_path, tiny_llama, tmp_path / "letters.jsonl", *settings, *ranks)
    process = run.start()
    wait_until(lambda: len(run.directory.metrics()) >= 3 or process.poll() is not None, 600, "three steps")
    assert process.poll() is None, run.output() + run.logs()
    kill_whole(process)
    assert run.start("--resume").wait(600) == 0, run.output() + run.logs()

    found = audit(run.directory.journal, run.directory.trained_path)
    assert found.clean and found.in_flight == 0, found.as_row()
    assert found.trained == STEPS * GROUPS
    rows = list(read_lines(run.directory.trained_path))
    (resumed_from,) = {row["resumed_from"] for row in rows if "resumed_from" in row}
    assert resumed_from in (2, 4)
    shares: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for row in rows:
        if "step" in row:
            shares[row["step"]][row["rank"]] = row["ordinals"]  # of a step made twice, the second time
    assert sorted(shares) == list(range(STEPS))
    for by_rank in shares.values():
        assert sorted(by_rank) == [0, 1] and by_rank[0] and by_rank[1]
        assert len({*by_rank[0], *by_rank[1]}) == GROUPS
    path, passed_over = checkpoint.latest(run.directory.path / "checkpoints")
    assert path is not None and not passed_over
    numbers = checkpoint.read_manifest(path).numbers
    assert numbers["steps/policy"] == STEPS
    metrics = run.directory.metrics()
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert all(row["groups/trained"] == GROUPS for row in metrics)  # of both ranks
    assert (run.directory.path / "model" / "model.safetensors").exists()
