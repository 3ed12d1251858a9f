"""Proves with fake hands that an engine which is lost comes back proven or not at all, that the others go on meanwhile,
and that the run ends only when no engine is left that could come back."""

from __future__ import annotations

import pytest

from launch.crew import LONGEST_S, START_S, Crew, RoleDied


class Hands:
    """Writes down what is done; a reference is (what, name), answered as the test says."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.answers: dict[tuple[str, str], str] = {}

    def bury(self, name):
        self.log.append(f"bury {name}")

    def restart(self, name):
        self.log.append(f"restart {name}")
        return "restart", name

    def rejoin(self, name):
        self.log.append(f"rejoin {name}")
        return "rejoin", name

    def set_to_work(self, name):
        assert self.answers.get(("rejoin", name)) == "", "set to work before the learner confirmed its weights"
        self.log.append(f"work {name}")

    def outcome(self, reference):
        return self.answers.get(reference)


class Scene:
    def __init__(self, names=("rollout-0", "rollout-1"), restarts=3) -> None:
        self.hands, self.now, self.events = Hands(), 0.0, []
        event = lambda kind, **fields: self.events.append((kind, fields))  # noqa: E731
        self.crew = Crew(names, restarts, self.hands, event, clock=lambda: self.now)

    def answer(self, what: str, name: str, outcome: str) -> None:
        self.hands.answers[what, name] = outcome
        self.crew.look()

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.crew.look()

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def test_a_lost_engine_is_named_started_again_proven_and_only_then_set_to_work() -> None:
    s = Scene()
    s.crew.lost("rollout-0", "ActorDiedError: killed")
    assert s.hands.log == ["bury rollout-0"] and s.kinds() == ["role_died", "role_restarting"]
    s.after(0.5)
    assert s.hands.log == ["bury rollout-0"], "started again before its back-off was over"
    s.after(0.6)
    assert s.crew.gauges("rollout-0")["absent"] == "starting"
    s.answer("restart", "rollout-0", "")
    assert s.crew.gauges("rollout-0")["absent"] == "joining"
    s.after(60.0)
    assert s.hands.log[-1] == "rejoin rollout-0"
    s.answer("rejoin", "rollout-0", "")
    assert s.hands.log == ["bury rollout-0", "restart rollout-0", "rejoin rollout-0", "work rollout-0"]
    assert s.kinds()[-1] == "role_restarted" and not s.crew.absent


def test_the_back_off_doubles_up_to_a_minute_and_ends_in_giving_up() -> None:
    s = Scene(restarts=8)
    pauses = []
    for _ in range(8):
        s.crew.lost("rollout-0", "died") if "rollout-0" not in s.crew.absent else None
        pauses.append(s.crew.absent["rollout-0"].until - s.now)
        s.after(pauses[-1])
        s.answer("restart", "rollout-0", "ConfigError: no model")
        s.hands.answers.clear()
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_S, LONGEST_S]
    assert s.crew.absent["rollout-0"].stage == "given up" and s.kinds()[-1] == "role_given_up"
    s.after(1e6)
    assert s.hands.log.count("restart rollout-0") == 8


def test_the_run_ends_when_the_last_engine_cannot_come_back_and_says_why() -> None:
    s = Scene(restarts=0)
    s.crew.lost("rollout-0", "killed")
    with pytest.raises(RoleDied, match=r"rollout-1 died: out of memory; no engine is left.*restarts = 0"):
        s.crew.lost("rollout-1", "out of memory")


def test_the_last_engine_may_come_back() -> None:
    s = Scene(names=("rollout-0",))
    s.crew.lost("rollout-0", "killed")
    s.after(1.0)
    s.answer("restart", "rollout-0", "")
    s.answer("rejoin", "rollout-0", "")
    assert not s.crew.absent


def test_an_engine_the_canary_refuses_never_works_and_counts_as_lost_again() -> None:
    s = Scene(names=("rollout-0",), restarts=1)
    s.crew.lost("rollout-0", "killed")
    s.after(1.0)
    s.answer("restart", "rollout-0", "")
    with pytest.raises(RoleDied, match="could not join again: NoEngine: canary"):
        s.answer("rejoin", "rollout-0", "NoEngine: canary")
    assert "work rollout-0" not in s.hands.log and s.hands.log.count("bury rollout-0") == 2


def test_a_start_that_never_answers_ends_at_its_deadline() -> None:
    s = Scene(restarts=1)
    s.crew.lost("rollout-0", "killed")
    s.after(1.0)
    s.after(START_S)
    assert s.crew.absent["rollout-0"].stage == "given up"


def test_only_an_engine_that_is_silent_for_long_is_lost_and_nothing_is_lost_twice() -> None:
    s = Scene()
    for answered in (False, False, True, False):
        s.now += 30.0
        s.crew.heard("rollout-0", answered, patience_s=60.0)
    assert not s.crew.absent
    s.now += 61.0
    s.crew.heard("rollout-0", False, patience_s=60.0)
    assert s.crew.absent["rollout-0"].reason == "has not answered for 61 s"
    s.crew.lost("rollout-0", "quarantined")
    assert s.kinds().count("role_died") == 1 and s.hands.log == ["bury rollout-0"]
