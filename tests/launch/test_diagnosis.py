"""Proves that `headrace why` names the loop that waits, what it waits for and who ends the wait, for each way in which
a run can be slow, stuck or dead; and that `status` shows the same run on one screen."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch.diagnosis import Finding, RunState, diagnose, read_run
from launch.status import status_data, status_text

NOW = 1100.0


def gauges(
    phase: str = "learn", phase_s: float = 1.0, in_flight: float = 8, age_s: float = 0.5, **queue: Any
) -> dict[str, Any]:
    counts = {
        "issued_total": 40,
        "issued": 0,
        "leased": 8,
        "generated": 0,
        "scored": 2,
        "taken": 8,
        "trained": 0,
        "committed": 16,
        "dropped": 6,
    }
    return {
        "time_s": NOW - age_s,
        "roles": {
            "learner-0": {"phase": phase, "phase_s": phase_s, "version": 4},
            "rollout-0": {"groups_in_flight": in_flight, "tokens_generated": 1000},
            "reward-0": {"groups_scored": 30},
        },
        "queue": {
            "counts": counts,
            "slots": {"all": 24, "used": 18},
            "conserved": True,
            "waiting": [],
            "stalled": "",
            **queue,
        },
    }


@pytest.fixture
def state(make_run: Any) -> Any:
    def make(steps: int = 4, events: list[Any] | None = None, now: float = NOW, **kinds: Any) -> RunState:
        run = make_run(steps=steps, events=events, gauges=kinds.pop("given", gauges(**kinds)))
        return read_run(run.path, now=now)

    return make


def found(state: RunState, who: str) -> list[Finding]:
    return [f for f in diagnose(state) if f.who == who]


def test_a_learner_that_waits_for_engines(state: Any) -> None:
    counts = {"scored": 3, "generated": 1, "leased": 20}
    [finding] = found(state(phase="take", phase_s=2.0, counts=counts), "learner-0")
    assert finding.severity == "waiting"
    assert (
        finding.what
        == "waits for groups for 2 s (usually 0.4 s): 3 of 8 scored, 1 wait for a reward, 20 being generated"
    )
    assert "unblocked by the engines" in finding.remedy


def test_a_learner_that_waits_for_rewards(state: Any) -> None:
    [finding] = found(state(phase="take", counts={"scored": 1, "generated": 14, "leased": 2}), "learner-0")
    assert "unblocked by the reward actors" in finding.remedy


def test_a_learner_that_waits_while_nobody_works(state: Any) -> None:
    s = state(phase="take", counts={"scored": 1, "generated": 0, "leased": 0, "issued": 3}, in_flight=0)
    assert "no engine holds a lease" in found(s, "learner-0")[0].remedy
    assert "nothing in flight though slots are free" in found(s, "rollout-0")[0].what


def test_a_wait_far_longer_than_usual_is_stuck_and_comes_first(state: Any) -> None:
    findings = diagnose(state(phase="take", phase_s=300.0))
    assert findings[0].severity == "stuck" and findings[0].who == "learner-0"
    findings = diagnose(state(phase="publish", phase_s=20.0))
    assert all(f.severity != "stuck" for f in findings)  # long for a publish, but not yet beyond doubt


def test_a_publish_names_the_deadline(state: Any) -> None:
    [finding] = found(state(phase="publish"), "learner-0")
    assert "waits for engines to take the new weights" in finding.what and "weights.timeout_s = 60 s" in finding.remedy


def test_an_engine_without_slots(state: Any) -> None:
    s = state(in_flight=0, slots={"all": 24, "used": 24}, counts={"scored": 16, "taken": 8})
    [finding] = found(s, "rollout-0")
    assert finding.what == "waits for a slot: all 24 are used (16 scored, 8 taken)"
    assert "the learner's next step are live" in finding.remedy


def test_the_queue_s_own_words_and_troubles_are_passed_on(state: Any) -> None:
    s = state(waiting=["learner-0 waits for step 4: 3 of 8"], stalled="No space left on device", conserved=False,
              bytes={"in_memory": 10, "limit": 10})  # fmt: skip
    texts = [f.what for f in found(s, "queue")]
    assert [f.severity for f in found(s, "queue")] == ["stuck", "alarm", "waiting", "waiting"]
    assert "cannot write its journal: No space left on device" in texts[0]
    assert "learner-0 waits for step 4: 3 of 8" in texts


def test_dead_roles_are_named_until_they_are_back(state: Any) -> None:
    died = {"time": 1090.0, "event": "role_died", "role": "rollout-0", "reason": "signal 9"}
    back = {"time": 1095.0, "event": "role_restarted", "role": "rollout-0"}
    [first, *_] = diagnose(state(events=[died]))
    assert first.severity == "dead" and "died 0:10 ago: signal 9" in first.what and "logs/rollout-0.log" in first.remedy
    assert all(f.severity != "dead" for f in diagnose(state(events=[died, back])))


def test_a_role_that_does_not_answer(state: Any) -> None:
    given = gauges()
    given["roles"]["rollout-0"] = {"silent": "GetTimeoutError: timed out"}
    [finding] = found(state(given=given), "rollout-0")
    assert finding.severity == "stuck" and "GetTimeoutError" in finding.what


def test_a_driver_that_was_killed(state: Any) -> None:
    findings = diagnose(state(age_s=42.0))
    assert findings[0].what == "the driver has said nothing for 0:42: it was killed"
    assert findings[0].remedy.endswith("--resume")
    assert all(f.who != "learner-0" for f in findings)  # what a dead run's roles did last is no news


def test_a_run_that_is_starting_and_one_that_ended(state: Any, make_run: Any) -> None:
    run = make_run(steps=0)
    [finding] = diagnose(read_run(run.path, now=1030.0))
    assert finding.what == "is still starting, 0:30 since run_started"
    ended = {"time": 1061.0, "event": "run_finished", "outcome": "stopped", "reason": "Ctrl-C"}
    first = diagnose(state(events=[ended], age_s=500.0))[0]
    assert (first.severity, first.what) == ("ended", "stopped at version 4: Ctrl-C") and "--resume" in first.remedy


def test_a_resumed_run_has_not_ended(state: Any) -> None:
    ended = {"time": 1061.0, "event": "run_finished", "outcome": "stopped"}
    again = {"time": 1070.0, "event": "run_starting", "resumed": True}
    assert not state(events=[ended, again]).ended


def test_alarms_of_the_weight_plane(state: Any) -> None:
    events = [
        {"time": 1000.0 + n, "event": "canary_alarm", "engine": "rollout-0", "reason": f"drift {n}"} for n in range(3)
    ]
    alarms = [f for f in diagnose(state(events=events)) if f.severity == "alarm"]
    assert [f.what for f in alarms] == ["canary_alarm 1:38 ago: drift 2"]


def test_the_bottleneck_over_the_whole_run(state: Any) -> None:
    [slow] = [f for f in diagnose(state()) if f.severity == "slow"]
    assert slow.what == "engines are idle 40 % of a step: learning is the bottleneck"


def test_groups_without_signal_are_the_first_cause(state: Any) -> None:
    drops = [{"time": 1000.0, "event": "dropped", "reason": "zero_signal", "ordinals": list(range(100))}]
    first, second = (f for f in diagnose(state(events=drops)) if f.severity == "slow")
    assert first.what == "100 groups had answers that were all equally good, against 32 trained"
    assert "learning is the bottleneck" in second.what


def test_status_shows_the_run_on_one_screen(state: Any) -> None:
    s = state(events=[{"time": 1001.0, "event": "evaluation", "version": 0, "name": "held_out", "score": 0.125}])
    text = status_text(s)
    for part in ("running, version 4 of 8", "0.125 at 0", "max 2 of 2", "16 committed", "phase learn", "0:28 left"):
        assert part in text, part
    data = json.loads(json.dumps(status_data(s)))
    assert data["outcome"] == "running" and data["version"] == 4 and data["held_out"] == {"held_out": [[0, 0.125]]}
    assert status_data(state(age_s=99))["outcome"].startswith("died")


def test_an_engine_that_is_being_started_again_is_waited_for_and_not_dead(state: Any) -> None:
    given = gauges(phase="publish", phase_s=3.0)
    given["roles"]["rollout-0"] = {"absent": "joining", "reason": "ActorDiedError: killed", "restarts": 1.0}
    events = [
        {"event": "role_died", "role": "rollout-0", "reason": "ActorDiedError: killed", "time": NOW - 9},
        {"event": "role_restarting", "role": "rollout-0", "restart": 1, "of": 3, "time": NOW - 9},
    ]
    s = state(given=given, events=events)
    (only,) = found(s, "rollout-0")
    assert only.severity == "waiting" and "takes the weights (restart 1 of 3)" in only.what and "killed" in only.what
    assert not s.dead()
    assert found(s, "learner-0")[0].remedy == "unblocked by an engine that comes back"


def test_an_engine_that_was_given_up_is_dead_while_the_run_goes_on(state: Any) -> None:
    events = [
        {"event": "role_died", "role": "rollout-1", "reason": "killed", "time": NOW - 9},
        {"event": "role_given_up", "role": "rollout-1", "reason": "killed", "restarts": 3, "time": NOW - 8},
    ]
    (only,) = found(state(events=events), "rollout-1")
    assert only.severity == "dead" and "given up 0:08 ago after 3 restarts: killed" in only.what
    assert "the run goes on with the other engines" in only.remedy


def test_answers_held_for_a_confirmation_are_said(state: Any) -> None:
    given = gauges()
    given["roles"]["rollout-0"]["groups_held"] = 3
    assert any("holds 3 groups" in f.what for f in found(state(given=given), "rollout-0"))
