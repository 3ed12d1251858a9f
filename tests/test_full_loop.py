"""Proves the whole loop on real parts: vLLM, Ray, DeepSpeed, ZeroMQ, gloo, as a user would run it, on a tiny model.

One run to the end: books balance, versions agree with commits, staleness stays within its bound, the metrics contract
is kept, the exported weights answer as vLLM did, nothing is left running. One run killed with -9 in the middle, every
process of it, and resumed: nothing lost, nothing twice, the same groups trained again in the same steps. Presets learn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.config import load
from launch.span_check import check_spans
from rollout.audit import audit
from rollout.event_log import read_lines
from rollout.metrics import unregistered
from tests.loop_runs import ROOT, Run, kill_whole, tree, wait_until

CONTRACT = [
    *("step", "version", "time_s", "reward/mean", "reward/std", "reward/lowercase_share", "groups/trained"),
    *("groups/dropped", "length/mean", "length/truncated", "loss/total", "loss/policy", "policy/kl", "policy/entropy"),
    *("policy/clip_fraction", "policy/ratio_mean", "policy/kl_behaviour", "grad_norm", "lr", "staleness/mean"),
    *("staleness/max", "tokens/trained", "throughput/rollout_tokens_per_s", "throughput/learner_tokens_per_s"),
    *("idle/learner", "idle/rollout", "time/wait", "time/train", "time/weight_sync", "weights/stall_s"),
    *("ledger/lost", "ledger/duplicated"),
]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from actors.prompts_data import write

    path = tmp_path_factory.mktemp("data") / "letters.jsonl"
    write("letters", path)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, prompts: Path) -> Iterator[Run]:
    """One run to its end, shared by the tests that look at what it left behind."""
    run = Run(tmp_path_factory.mktemp("finished"), tiny_llama, prompts)
    process = run.start()
    seen: set[int] = set()
    deadline = time.monotonic() + 400
    while process.poll() is None:
        assert time.monotonic() < deadline, run.output() + run.logs()
        seen |= {p.pid for p in tree(process.pid)} if psutil.pid_exists(process.pid) else set()
        time.sleep(0.5)
    assert process.returncode == 0, run.output() + run.logs()
    run.seen = seen
    yield run


def test_nothing_is_left_running(finished: Run) -> None:
    assert len(finished.seen) > 6, "the run started fewer processes than it has roles"
    alive = [p for p in finished.seen if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
    wait_until(lambda: not [p for p in alive if psutil.pid_exists(p)], 20, f"processes {alive} to end")


def test_the_books_balance(finished: Run) -> None:
    found = audit(finished.directory.journal, finished.directory.trained_path)
    assert found.clean and found.in_flight == 0
    assert found.issued == found.trained + sum(found.dropped.values())
    assert found.trained == 8 * 8
    last = finished.directory.metrics()[-1]
    assert (last["ledger/lost"], last["ledger/duplicated"]) == (0, 0)


def test_every_token_comes_from_a_committed_version_within_the_bound(finished: Run) -> None:
    found = check_spans(finished.directory, load(finished.directory.config_path).staleness.bound)
    assert found.groups > 0 and found.tokens > 0
    assert not found.wrong
    metrics = finished.directory.metrics()
    assert max(row["staleness/max"] for row in metrics) <= 2
    assert max(row["staleness/max"] for row in metrics) > 0, "nothing was asynchronous about this run"


def test_one_metrics_line_per_step_with_every_key_of_the_contract(finished: Run) -> None:
    metrics = finished.directory.metrics()
    assert [row["step"] for row in metrics] == list(range(1, 9))
    for row in metrics:
        assert not [key for key in CONTRACT if row.get(key) is None], row
        assert not unregistered(row)
    assert {row["version"] for row in metrics if "eval/held_out/reward" in row} == {4, 8}


def test_it_learned(finished: Run) -> None:
    scores = {e["version"]: e["score"] for e in finished.directory.events() if e["event"] == "evaluation"}
    assert scores[8] > scores[0] + 0.2


def test_its_journal_teaches_by_preferences(finished: Run) -> None:
    """Best against worst of each group, from the weights the run began with: what was learnt came from the journal."""
    from benchmarks.learning_pairs import learn

    found = learn(finished.directory)
    assert found.pairs + found.held_out_pairs > 40, "too few pairs to prove anything"
    assert found.margin[1] > 0.5 and found.accuracy > 0.7, found  # of 16 or so held-out pairs, some are near ties
    assert found.reward[0] < 0.3 and found.reward[1] > found.reward[0] + 0.5, found


def test_the_exported_weights_answer_as_vllm_did(finished: Run) -> None:
    export_answers_as_vllm_did(finished)


def export_answers_as_vllm_did(run: Run) -> None:
    """The last evaluation was answered by vLLM with the weights it serves at the end; transformers loads the export."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_dir = run.directory.path / "model"
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rows = list(read_lines(run.directory.evaluations / "v00000008.jsonl"))
    assert len(rows) == 16
    before = list(read_lines(run.directory.evaluations / "v00000000.jsonl"))
    assert [r["answer"] for r in rows] != [r["answer"] for r in before], "training changed no answer: proves nothing"
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt")
        answer = model.generate(**ids, do_sample=False, max_new_tokens=8)[0, ids["input_ids"].shape[1] :]
        assert answer.tolist()[: len(row["token_ids"])] == row["token_ids"]


def test_the_report_is_there(finished: Run) -> None:
    assert finished.directory.report_path.stat().st_size > 10_000
    assert finished.directory.curves_path.stat().st_size > 10_000


def test_with_adapters_only_adapters_travel(tmp_path: Path, tiny_llama: Path, prompts: Path) -> None:
    run = Run(tmp_path, tiny_llama, prompts, "topology.learner.lora_rank=4", "algorithm.learning_rate=0.03")
    assert run.start().wait(400) == 0, run.output() + run.logs()
    events = run.directory.events()
    commits = [e for e in events if e["event"] == "weights_committed"]
    assert [e["version"] for e in commits] == list(range(9))
    assert max(e["bytes"] for e in commits) < (tiny_llama / "model.safetensors").stat().st_size / 4
    assert not [e for e in events if e["event"] in ("weights_refused", "canary_alarm", "engine_quarantined")]
    scores = {e["version"]: e["score"] for e in events if e["event"] == "evaluation"}
    assert scores[8] > scores[0] + 0.2
    export_answers_as_vllm_did(run)  # merged by the learner, computed side by side in the engine
    assert not check_spans(run.directory, bound=2).wrong


def engine_processes(run: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The rollout actor, and the process below it in which vLLM computes."""
    actor = next(p for p in tree(run.pid) if "RolloutActor" in " ".join(p.cmdline()))
    return [actor, max(actor.children(recursive=True), key=lambda p: p.memory_info().rss)]


def test_an_engine_that_is_killed_comes_back_and_the_run_ends_normally(
    tmp_path: Path, tiny_llama: Path, prompts: Path
) -> None:
    """The only engine: first vLLM's own process dies under its actor, then the actor itself with all it holds."""
    settings = ("run.steps=24", "evaluate.every=0", "checkpoint.every=0", "topology.queue.lease_s=5")
    run = Run(tmp_path, tiny_llama, prompts, *settings)
    process = run.start()

    def happened(kind: str) -> list[dict[str, Any]]:
        return [e for e in run.directory.events() if e["event"] == kind]

    dead: list[psutil.Process] = []
    for times, victim in enumerate((1, 0), start=1):
        enough = 3 * times
        wait_until(lambda n=enough: len(run.directory.metrics()) >= n or process.poll() is not None, 300, "steps")
        assert process.poll() is None, run.output() + run.logs()
        family = engine_processes(process)
        dead += family
        family[victim].kill()
        wait_until(
            lambda n=times: len(happened("role_restarted")) == n or process.poll() is not None, 300, "it to come"
        )
        assert process.poll() is None, run.output() + run.logs()
    assert process.wait(300) == 0, run.output() + run.logs()

    assert not [p for p in dead if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], "an engine outlived its loss"
    assert len(happened("role_died")) == len(happened("role_restarting")) == 2
    assert "vLLM's engine process died" in happened("role_died")[0]["reason"]
    assert "role_restarted" in run.output()
    found = audit(run.directory.journal, run.directory.trained_path)
    assert found.clean and found.in_flight == 0, json.dumps(found.as_row())
    assert found.trained == 24 * 8
    assert [row["step"] for row in run.directory.metrics()] == list(range(1, 25))
    assert not check_spans(run.directory, bound=2).wrong
    proven = [e["time"] for e in happened("weights_committed")]
    for back in happened("role_restarted"):
        died = max(e["time"] for e in happened("role_died") if e["time"] < back["time"])
        assert any(died < t < back["time"] for t in proven), "it was let in before anything was committed and confirmed"


def test_killed_whole_it_resumes_and_loses_nothing(tmp_path: Path, tiny_llama: Path, prompts: Path) -> None:
    run = Run(tmp_path, tiny_llama, prompts, "run.steps=12", "checkpoint.every=3", "evaluate.every=0")
    process = run.start()
    wait_until(lambda: len(run.directory.metrics()) >= 5 or process.poll() is not None, 240, "five steps")
    assert process.poll() is None, run.output() + run.logs()
    kill_whole(process)
    trained_before = [row for row in read_lines(run.directory.trained_path) if "step" in row]

    assert run.start("--resume").wait(400) == 0, run.output() + run.logs()
    found = audit(run.directory.journal, run.directory.trained_path)
    assert found.clean and found.in_flight == 0, json.dumps(found.as_row())
    assert found.trained == 12 * 8
    assert [row["step"] for row in run.directory.metrics()] == list(range(1, 13))
    resumed_at = next(row["resumed_from"] for row in read_lines(run.directory.trained_path) if "resumed_from" in row)
    assert resumed_at in (3, 6, 9) and max(row["step"] for row in trained_before) >= resumed_at
    assert not check_spans(run.directory, bound=2).wrong


def cells(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs of the benchmark of learning, one after the other in the same processes."""
    command = [sys.executable, "-m", "benchmarks.learning", "--json", str(folder / "cells.jsonl"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_policy_and_a_preference_objective_learn_from_old_answers(tmp_path: Path) -> None:
    """Two cells of docs/algorithms.md that have little in common; `make soak` runs all of them."""
    from benchmarks.learning_table import read

    ran = cells(tmp_path, "--presets", "gspo_token", "dpo", "--staleness", "4")
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
    found = read(tmp_path / "cells.jsonl")
    assert [c.preset for c in found] == ["gspo_token", "dpo"]
    assert all(c.books and c.staleness_max == 4 for c in found)
    margin = found[1].margin  # on the pairs of each step, before it learns from them
    assert len(margin) == 32 and sum(margin[16:]) / 16 > sum(margin[:4]) / 4 + 0.3, margin


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_preset_learns_at_every_staleness(tmp_path: Path) -> None:
    ran = cells(tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
