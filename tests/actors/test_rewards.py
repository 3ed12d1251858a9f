"""Proves that whatever a reward does, every answer gets exactly one verdict in time, an error is never a zero, one
sample's trouble leaves its neighbours alone, and nothing that a reward started outlives the scorer.

Real worker processes throughout; deadlines are a backstop here, what is asserted is the kind of verdict.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from actors.config import RewardConfig
from actors.rewards import build, check
from actors.rewards.breaker import Breaker, ErrorBudget
from actors.rewards.descendants import descendants
from actors.rewards.shaping import overlong
from actors.rewards.verifiers import VERIFIERS
from rollout.errors import ConfigError
from rollout.types import Failed, Prompt, Scored, TimedOut, Verdict

BAD = f"{Path(__file__).parent / 'misbehaving.py'}"


def prompt(**meta: object) -> Prompt:
    return Prompt(0, "q", np.array([1], dtype=np.int32), meta)


def function(name: str, **changes: object) -> RewardConfig:
    return RewardConfig(kind="function", path=f"{BAD}:{name}", label="f", **changes)


def verifier(name: str, **changes: object) -> RewardConfig:
    return RewardConfig(kind="verifier", name=name, **changes)


def gone(pid: int) -> bool:
    """True once the process is dead (a zombie of somebody else counts as dead)."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


class Events(list):
    """An event log of one list: [("reward_circuit_open", {...}), ...]."""

    def __call__(self, event: str, **fields: object) -> None:
        self.append((event, fields))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self]


@pytest.fixture(scope="module")
def on_demand():
    """One scorer for all quick ways of going wrong: that it goes on after each is part of the proof."""
    scorer = build([function("on_demand", deadline_s=30, memory_mb=512, breaker=1000)])
    yield scorer
    scorer.close()


def kind(verdict: Verdict) -> str:
    return verdict.kind if isinstance(verdict, Failed) else type(verdict).__name__


@pytest.mark.parametrize(
    ("way", "expected", "detail"),
    [
        ("raise", "raised", "ZeroDivisionError: on purpose (misbehaving.py:"),
        ("raise_unprintable", "raised", "Unprintable: (its message cannot be printed)"),
        ("nan", "nan", "NaN"),
        ("inf", "infinite", "-inf"),
        ("none", "none", "None"),
        ("string", "not_a_number", "str '1.0'"),
        ("list", "not_a_number", "list [1.0]"),
        ("complex", "not_a_number", "complex"),
        ("huge", "raised", "OverflowError"),
        ("strange", "raised", "OverflowError: no number here"),
        ("exit", "exited", "exit(4)"),
        ("die", "crashed", "exit code 5"),
        ("segfault", "crashed", "signal 11"),
        ("interrupt", "raised", "KeyboardInterrupt"),
        ("too_much", "out_of_memory", "memory_mb"),
        ("scribble", "crashed", ""),
        ("close_everything", "crashed", ""),
        ("die_with_daemon", "crashed", "exit code 3"),
    ],
)
def test_a_failing_sample_is_named_and_its_neighbours_are_scored(on_demand, way, expected, detail):
    before, bad, after = on_demand.score(prompt(), ["good", way, "good"])
    assert isinstance(bad, Failed) and bad.kind == expected and detail in bad.detail
    assert before == after == Scored(1.0, {"f": 1.0})


@pytest.mark.parametrize("way", ["true", "print", "fork", "fork_raise", "thread"])
def test_odd_but_working_rewards_are_scored_once(on_demand, way):
    """Prints do not become answers, and forked children that come back do not answer."""
    verdicts = on_demand.score(prompt(), ["good"] + [way] * 5 + ["good"])
    assert verdicts == [Scored(1.0, {"f": 1.0})] * 7


@pytest.mark.parametrize("way", ["leak", "fork_many"])
def test_leaks_and_leftover_children_end_the_process_between_samples(on_demand, way):
    """16 x 40 MB is more than memory_mb: no sample of them pays for it, the process is replaced in time."""
    before = on_demand.gauges()["process_starts/f"]
    assert on_demand.score(prompt(), [way] * 16) == [Scored(1.0, {"f": 1.0})] * 16
    assert on_demand.gauges()["process_starts/f"] > before + 1


@pytest.mark.parametrize("way", ["hang", "hang_in_c", "hang_deaf", "stop"])
def test_a_sample_that_hangs_is_killed_and_the_next_one_is_scored(way):
    scorer = build([function("on_demand", deadline_s=2.0)])
    good = Scored(1.0, {"f": 1.0})
    try:
        assert scorer.score(prompt(), ["good", way, "good", "good"]) == [good, TimedOut(2.0), good, good]
    finally:
        scorer.close()


def test_nothing_a_reward_started_outlives_it(tmp_path, monkeypatch):
    """A daemon in a session of its own, with all pipes open, dies with the worker; so does a crowd of children."""
    pids = tmp_path / "pids"
    monkeypatch.setenv("MISBEHAVING_PID_FILE", str(pids))
    scorer = build([function("on_demand", deadline_s=30)])
    worker = next(iter(scorer._components[0]._processes)).pid
    assert scorer.score(prompt(), ["daemon"]) == [Scored(1.0, {"f": 1.0})]
    daemon = int(pids.read_text())
    assert daemon in descendants(worker)
    scorer.close()
    assert gone(worker) and gone(daemon)


def test_workers_die_with_their_owner(tmp_path):
    """kill -9 of the owner while one reward sleeps: the worker notices that its input is closed."""
    import subprocess
    import sys

    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"""
import numpy as np
from actors.config import RewardConfig
from actors.rewards import build
from rollout.types import Prompt
s = build([RewardConfig(kind="function", path={BAD + ":on_demand"!r}, label="f", deadline_s=100)])
print(s._components[0]._processes[0].pid, flush=True)
s.score(Prompt(0, "q", np.array([1], dtype=np.int32), {{}}), ["hang"])
""",
        ],
        stdout=subprocess.PIPE,
    )
    worker = int(owner.stdout.readline())
    assert not Path(f"/proc/{worker}/stat").read_text().endswith("Z")
    owner.kill()
    owner.wait()
    assert gone(worker)


def test_close_interrupts_what_is_running():
    import threading

    scorer = build([function("on_demand", deadline_s=100)])
    verdicts: list[Verdict] = []
    running = threading.Thread(target=lambda: verdicts.extend(scorer.score(prompt(), ["hang"] * 3)))
    running.start()
    worker = scorer._components[0]._processes[0].pid
    scorer.close()
    scorer.close()
    running.join(20)
    assert not running.is_alive() and gone(worker)
    assert {kind(v) for v in verdicts} <= {"crashed", "closed"} and len(verdicts) == 3


def test_circuit_opens_after_failures_in_a_row_and_the_rest_goes_on():
    events = Events()
    scorer = build([function("on_demand", breaker=5), verifier("exact", weight=0.0)], events)
    try:
        verdicts = scorer.score(prompt(answer="raise"), ["raise"] * 8)
    finally:
        scorer.close()
    assert [kind(v) for v in verdicts] == ["raised"] * 5 + ["circuit_open"] * 3
    assert events.names == ["reward_failed", "reward_circuit_open"]
    last = events[0][1]["detail"]
    assert "ZeroDivisionError" in last
    assert events[0][1] == {"component": "f", "kind": "raised", "detail": last}
    assert events[1][1] == {"component": "f", "failures": 5, "last": last}


def test_breaker_tries_again_after_a_rest_that_doubles():
    breaker = Breaker(limit=2, rest_s=10.0)
    assert [breaker.record(False, t) for t in (0.0, 1.0)] == [None, "opened"]
    assert not breaker.admit(10.9)
    assert breaker.admit(11.0) and not breaker.admit(11.0)  # one trial at a time
    assert breaker.record(False, 12.0) is None and not breaker.admit(31.9)
    assert breaker.admit(32.0)
    assert breaker.record(True, 33.0) == "closed"
    assert breaker.admit(33.0) and breaker.record(False, 34.0) is None and breaker.admit(34.0)


def test_samples_admitted_before_the_circuit_opened_do_not_reopen_it():
    breaker = Breaker(limit=2)
    assert [breaker.record(False, 0.0) for _ in range(4)] == [None, "opened", None, None]


def test_error_budget_speaks_once_per_crossing():
    budget = ErrorBudget(window=10, share=0.2)
    said = [budget.record(ok) for ok in [True] * 7 + [False] * 5 + [True] * 10 + [False] * 3]
    assert [i for i, s in enumerate(said) if s] == [9, 24]


def test_composition_weights_and_keeps_raw_components():
    scorer = build(
        [
            verifier("exact", weight=2.0),
            function("length_of", weight=-0.5, args={"factor": 2}),
            RewardConfig(kind="overlong", args={"max": 10, "cache": 4}, weight=0.5),
            RewardConfig(kind="length", weight=0.0),
        ],
        processes=2,
    )
    try:
        with_lengths = scorer.score(prompt(answer="ab"), ["ab", "abc"], [range(8), range(12)])
        without = scorer.score(prompt(answer="ab"), ["ab"])
    finally:
        scorer.close()
    assert with_lengths[0] == Scored(
        2.0 - 0.5 * 4 + 0.5 * -0.5, {"exact": 1.0, "f": 4.0, "overlong": -0.5, "length": 8.0}
    )
    assert with_lengths[1] == Scored(-0.5 * 6 - 0.5, {"exact": 0.0, "f": 6.0, "overlong": -1.0, "length": 12.0})
    assert without == [Scored(0.0, {"exact": 1.0, "f": 4.0})]  # held-out answers are not shaped


def test_held_out_answers_are_judged_side_by_side_without_shaping():
    scorer = build([verifier("exact"), RewardConfig(kind="overlong", args={"max": 1, "cache": 1})], processes=2)
    try:
        asked = [prompt(answer=str(i)) for i in range(20)]
        verdicts = scorer.judge(asked, [str(i if i % 3 else -1) for i in range(20)])
    finally:
        scorer.close()
    assert verdicts == [Scored(float(i % 3 > 0), {"exact": float(i % 3 > 0)}) for i in range(20)]


def test_a_watched_component_costs_nothing_when_it_fails():
    scorer = build([verifier("exact"), function("on_demand", weight=0.0)])
    try:
        verdicts = scorer.score(prompt(answer="raise"), ["raise", "good"])
    finally:
        scorer.close()
    assert verdicts == [Scored(1.0, {"exact": 1.0}), Scored(0.0, {"exact": 0.0, "f": 1.0})]


def test_order_is_kept_over_several_processes_and_callers(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    scorer = build([function("length_of")], processes=3, log_dir=tmp_path)
    try:
        with ThreadPoolExecutor(4) as callers:
            batches = list(callers.map(lambda n: scorer.score(prompt(), ["x" * i for i in range(n)]), [30, 20, 10, 40]))
    finally:
        scorer.close()
    assert [[v.value for v in b] for b in batches] == [[float(i) for i in range(n)] for n in (30, 20, 10, 40)]
    assert scorer.gauges()["verdicts/scored"] == 100.0
    assert (tmp_path / "reward-f.log").exists()


def test_a_storm_of_failures_from_several_callers_gets_every_answer_its_own_verdict():
    import random
    from concurrent.futures import ThreadPoolExecutor

    expected = {"good": "Scored", "raise": "raised", "die": "crashed", "nan": "nan", "segfault": "crashed"}
    expected |= {"exit": "exited", "string": "not_a_number", "fork": "Scored", "scribble": "crashed", "print": "Scored"}
    chance = random.Random(0)
    batches = [chance.choices(list(expected), k=chance.randrange(1, 20)) for _ in range(16)]
    scorer = build([function("on_demand", deadline_s=60, breaker=10_000)], processes=3)
    try:
        with ThreadPoolExecutor(4) as callers:
            verdicts = list(callers.map(lambda batch: scorer.score(prompt(), batch), batches))
    finally:
        scorer.close()
    assert [[kind(v) for v in vs] for vs in verdicts] == [[expected[way] for way in batch] for batch in batches]
    counted = {k: n for k, n in scorer.gauges().items() if k.startswith("verdicts/")}
    assert sum(counted.values()) == sum(map(len, batches))


def test_prints_go_to_the_log(tmp_path):
    scorer = build([function("on_demand")], log_dir=tmp_path)
    try:
        assert scorer.score(prompt(), ["print"]) == [Scored(1.0, {"f": 1.0})]
    finally:
        scorer.close()
    assert (tmp_path / "reward-f.log").read_text().count('"value": 99') == 2


def test_large_prompts_and_odd_texts_reach_the_worker():
    scorer = build([verifier("exact"), function("length_of", weight=0.0)])
    texts = ["x" * 3_000_000, "\ud800 lone", "a\u2028b\nc\x00", ""]
    try:
        verdicts = [scorer.score(prompt(answer=t, filler="y" * 1_000_000), [t])[0] for t in texts]
    finally:
        scorer.close()
    assert [(v.components["exact"], v.components["f"]) for v in verdicts] == [(1.0, float(len(t))) for t in texts]


# ---- what is refused before a run starts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (RewardConfig(kind="function", path="no_such_module:f"), "module 'no_such_module' is neither installed nor in"),
        (RewardConfig(kind="function", path="no/such/file.py:f"), "no/such/file.py does not exist"),
        (RewardConfig(kind="function", path=f"{BAD}:length_off"), "did you mean length_of?"),
        (RewardConfig(kind="function", path=f"{BAD}:HOARD"), "is list, not a function"),
        (RewardConfig(kind="function", path=f"{BAD}:length_of", args={"factr": 2}), "'factr'"),
        (RewardConfig(kind="function", path="tests.nothing.here:f"), "tests.nothing"),
        (verifier("exakt"), "did you mean exact?"),
        (verifier("exact", args={"ignorecase": True}), "'ignorecase'"),
        (verifier("regex"), "pattern"),
        (verifier("regex", args={"pattern": "("}), "'(' is not a regular expression"),
    ],
)
def test_what_cannot_be_loaded_is_a_config_error(reward, message):
    with pytest.raises(ConfigError) as caught:
        check([reward])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('no GPU\\nhere')", "RuntimeError: no GPU here (broken.py:1)"),
        ("import nothing_of_the_kind", "nothing_of_the_kind"),
        ("def f(:", "SyntaxError"),
        ("import os; os._exit(7)", "died while loading (exit code 7)"),
        ("raise SystemExit(2)", "SystemExit"),
    ],
)
def test_a_module_that_fails_on_import_is_a_config_error(tmp_path, code, message):
    (tmp_path / "broken.py").write_text(code)
    with pytest.raises(ConfigError) as caught:
        check([RewardConfig(kind="function", path=f"{tmp_path}/broken.py:f")])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_verifier_without_its_column_is_a_config_error():
    with pytest.raises(ConfigError, match=r"needs the column 'answer'.*it has solution"):
        check([verifier("exact")], [prompt(solution="4")])
    check([verifier("exact", args={"reference": "solution"})], [prompt(solution="4")])


@pytest.mark.parametrize(
    "section",
    [
        {"kind": "verifier"},
        {"kind": "function", "path": "no_colon"},
        {"kind": "function", "path": ":f"},
        {"kind": "verifier", "name": "exact", "path": "a:b"},
        {"kind": "verifier", "name": "exact", "label": "../../etc/passwd"},
        {"kind": "overlong", "args": {"max": 4, "cache": 5}},
        {"kind": "overlong", "args": {"max": 4.5, "cache": 1}},
        {"kind": "overlong"},
        {"kind": "length", "args": {"max": 4}},
        {"kind": "verifier", "name": "exact", "weight": float("nan")},
        {"kind": "verifier", "name": "exact", "deadline": 3},
    ],
)
def test_contradictory_sections_are_refused(section):
    with pytest.raises(ValueError, match="RewardConfig"):
        RewardConfig(**section)


def test_two_components_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two components are called 'exact'"):
        build([verifier("exact"), verifier("exact")])


# ---- what the verifiers say -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "answer", "meta", "args", "value"),
    [
        ("exact", " [1, 2, 3]", {"answer": "[1, 2, 3]"}, {}, 1.0),
        ("exact", "[1, 2, 3] ok", {"answer": "[1, 2, 3]"}, {}, 0.0),
        ("exact", "yes", {"answer": ["YES", "Yes"]}, {"ignore_case": True}, 1.0),
        ("exact", "4", {"answer": 4}, {}, 1.0),
        ("contains", "it is 42.", {"answer": "42"}, {}, 1.0),
        ("contains", "it is 41.", {"answer": "42"}, {}, 0.0),
        ("regex", "<think>a</think> b", {}, {"pattern": "^<think>.*</think>"}, 1.0),
        ("regex", "so (3), no, (42)", {"answer": "42"}, {"pattern": r"\((\d+)\)", "reference": "answer"}, 1.0),
        ("regex", "so (42), no, (3)", {"answer": "42"}, {"pattern": r"\((\d+)\)", "reference": "answer"}, 0.0),
        ("numeric", "about 1,234.50 dollars", {"answer": "1234.5"}, {}, 1.0),
        ("numeric", "3 + 4 = 7", {"answer": 7}, {}, 1.0),
        ("numeric", "7 = 3 + 4", {"answer": 7}, {"which": "first"}, 1.0),
        ("numeric", "-0.5", {"answer": "-.5"}, {}, 1.0),
        ("numeric", "1,2,3", {"answer": 3}, {}, 1.0),
        ("numeric", "no idea", {"answer": 7}, {}, 0.0),
        ("numeric", "3.15", {"answer": "3.14159"}, {"tolerance": 0.01}, 1.0),
        ("math", r"\boxed{\frac{1}{2}}", {"answer": "0.5"}, {}, 1.0),
        ("math", "the answer is $x^2 + 2x + 1$", {"answer": "(x+1)^2"}, {}, 1.0),
        ("math", "$3$", {"answer": "4"}, {}, 0.0),
        ("math", "", {"answer": "4"}, {}, 0.0),
    ],
)
def test_verifier_values(name, answer, meta, args, value):
    assert VERIFIERS[name](answer, meta, **args) == value


def test_reasoning_gym_scores_its_own_entry():
    from actors.reasoning_tasks import ReasoningTask

    row = ReasoningTask("countdown", {}, seed=3).row(1234)  # many answers are right: only the task can tell
    meta = json.loads(json.dumps(row.meta))
    scorer = build([verifier("reasoning_gym", deadline_s=30)])
    try:
        verdicts = scorer.score(prompt(**meta), [f" {row.meta['answer']}\n", "1 +", ""])
    finally:
        scorer.close()
    assert verdicts[0] == Scored(1.0, {"reasoning_gym": 1.0})
    assert all(isinstance(v, Scored) and v.value < 0.1 for v in verdicts[1:])


@pytest.mark.parametrize(("tokens", "value"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)])
def test_soft_overlong_punishment_by_hand(tokens, value):
    assert overlong(tokens, longest=100, cache=20) == pytest.approx(value)


def test_workers_use_one_thread_each():
    """One BLAS thread per worker whatever the owner has (unpinned threads cost a third of a step elsewhere)."""
    scorer = build([function("length_of")])
    try:
        pid = scorer._components[0]._processes[0].pid
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    finally:
        scorer.close()
    assert b"OMP_NUM_THREADS=1" in environment and os.getpid() != pid
