"""Proves that the learner's view of its engines survives their deaths: rates count each process from zero, and held-out
prompts that one leaves unanswered go to the others."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from actors.fleet import Fleet
from rollout.errors import EngineError
from rollout.types import Prompt


class Actor:
    """An actor whose calls are answered when they are looked at; a dead one raises then."""

    def __init__(self, name: str, tokens: float = 0.0, dead: bool = False) -> None:
        self.name, self.tokens, self.dead = name, tokens, dead
        self.gauges = SimpleNamespace(remote=lambda: self._later(lambda: self._gauges()))
        self.answer = SimpleNamespace(remote=lambda prompts: self._later(lambda: [(self.name, p) for p in prompts]))

    def _gauges(self):
        return {"tokens_generated": self.tokens, "waiting_s": 0.0}

    def _later(self, value):
        return lambda: ConnectionError(f"{self.name} died") if self.dead else value()


def fleet(*actors: Actor) -> Fleet:
    made = Fleet(lambda asked, within_s: {name: reference() for name, reference in asked.items()})
    for actor in actors:
        made.join(actor.name, actor)
    return made


def prompts(n: int) -> list[Prompt]:
    return [Prompt(o, "p", np.zeros(1, np.int32)) for o in range(n)]


def test_every_prompt_is_answered_in_order_by_whoever_is_alive() -> None:
    f = fleet(Actor("a"), Actor("b", dead=True), Actor("c"))
    answers = f.answer(prompts(7))
    assert [p.ordinal for _, p in answers] == list(range(7)) and {who for who, _ in answers} == {"a", "c"}
    f.leave("a")
    assert {who for who, _ in f.answer(prompts(3))} == {"c"}


def test_no_engine_left_is_an_error_that_says_why() -> None:
    with pytest.raises(EngineError, match="no engine is left to answer 2 of 2 prompts; a: a died"):
        fleet(Actor("a", dead=True)).answer(prompts(2))
    with pytest.raises(EngineError):
        fleet().answer(prompts(1))


def test_an_engine_that_came_back_counts_from_zero_and_a_dead_one_costs_nothing() -> None:
    a, b = Actor("a", tokens=100.0), Actor("b", tokens=50.0)
    f = fleet(a, b)
    f.rates()
    a.tokens, b.dead = 160.0, True
    f._looked -= 1.0
    assert f.rates()["throughput/rollout_tokens_per_s"] == pytest.approx(60.0, rel=0.1)
    f.join("b", Actor("b", tokens=30.0))
    f._looked -= 1.0
    assert f.rates()["throughput/rollout_tokens_per_s"] == pytest.approx(30.0, rel=0.1)
    assert fleet().rates()["idle/rollout"] == 1.0
