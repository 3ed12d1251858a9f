"""Proves the choreography with fakes: order of calls, who is blamed for what, that nothing hangs or is served unproven,
and that a push ends with a report or a named error for every single failure of every step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from actors.weight_sync import CanaryPlan, WeightSync
from learner.weight_epochs import Sent
from rollout.canary import CanaryText
from rollout.engine import CommitReport, Rendezvous
from rollout.errors import DeadlineError, EngineError, WeightError
from rollout.versions import WeightManifest


@dataclass
class FakeSender:
    log: list[str]
    root: str = "root"
    fail_sends: int = 0
    missing: str = ""

    async def invite(self, members):
        self.log.append(f"invite {','.join(members)}")
        self.invited = tuple(members)
        return {n: Rendezvous(1, "h", 1, i, len(members) + 1, 1.0) for i, n in enumerate(members, 1)}

    async def enter(self):
        if self.missing in self.invited and self.missing:
            raise DeadlineError(f"{self.missing} to enter weight group epoch 1", 1.0)

    async def announce(self, version):
        return WeightManifest(version, ())

    async def send(self, manifest):
        self.log.append(f"send {manifest.version}")
        if self.fail_sends:
            self.fail_sends -= 1
            raise WeightError("weight group broke")
        return Sent(manifest, self.root, 10, 0.1)

    async def close_group(self):
        self.log.append("close")


@dataclass
class FakeEngine:
    """Fails at `step` with `error`, `times` times; error None means: never answers."""

    log: list[str]
    name: str
    step: str = ""
    error: Exception | None = None
    times: int = 99
    logprob: float = -1.0
    served: list[int] = field(default_factory=list)
    confirmed: list[int] = field(default_factory=list)

    async def _at(self, step: str) -> None:
        self.log.append(f"{self.name} {step}")
        if step == self.step and self.times > 0:
            self.times -= 1
            if self.error is None:
                await asyncio.Event().wait()
            raise self.error

    async def join(self, rendezvous):
        await self._at("join")

    async def stage_weights(self, manifest):
        await self._at("stage")
        return 0.1

    async def commit_weights(self, version, digest=""):
        await self._at("commit")
        assert digest == "root"
        self.served.append(version)
        return CommitReport(version, 0.3, 0.2)

    async def confirm_weights(self, version):
        await self._at("confirm")
        self.confirmed.append(version)

    async def condemn(self, reason):
        await self._at("condemn")

    async def discard_weights(self):
        await self._at("discard")

    async def score(self, prompt_ids, token_ids, temperature):
        await self._at("score")
        return np.full(len(token_ids), self.logprob, np.float32)


class World:
    def __init__(self, *engines: dict, **sender) -> None:
        self.log: list[str] = []
        self.events: list[tuple[str, dict]] = []
        self.sender = FakeSender(self.log, **sender)

        async def wanted(version):
            return [np.full(2, -1.0, np.float32)]

        plan = CanaryPlan((CanaryText((1,), (2, 3)),), wanted)
        self.sync = WeightSync(
            self.sender, lambda kind, **f: self.events.append((kind, f)), timeout_s=0.05, grace_s=0.05, canary=plan
        )
        self.engines = {}
        for i, settings in enumerate(engines):
            self.add(f"e{i}", **settings)

    def add(self, name: str, **settings) -> FakeEngine:
        self.engines[name] = FakeEngine(self.log, name, **settings)
        self.sync.admit(name, self.engines[name])
        return self.engines[name]

    def kinds(self) -> list[str]:
        return [k for k, _ in self.events if k != "engine_admitted"]


async def test_the_order_of_one_push() -> None:
    w = World({}, {})
    report = await w.sync.push(1, grad_norm=0.5)
    assert w.log[0] == "invite e0,e1" and set(w.log[1:3]) == {"e0 join", "e1 join"}
    assert set(w.log[3:6]) == {"send 1", "e0 stage", "e1 stage"}
    assert set(w.log[6:8]) == {"e0 commit", "e1 commit"} and set(w.log[8:10]) == {"e0 score", "e1 score"}
    assert set(w.log[10:]) == {"e0 confirm", "e1 confirm"}
    assert report.committed.keys() == {"e0", "e1"} and report.stall_s == 0.3 and not report.quarantined
    assert report.metrics()["weights/bytes"] == 10 and report.metrics()["weights/canary"] == 0.0
    assert w.kinds() == ["weights_committed"] * 2 and w.events[-1][1]["digest"] == "root"


async def test_the_second_push_keeps_the_epoch_and_a_newcomer_begins_one() -> None:
    w = World({})
    for v in (1, 2):
        await w.sync.push(v)
    assert w.log.count("invite e0") == 1
    w.add("e1")
    await w.sync.push(3)
    assert "invite e0,e1" in w.log and w.engines["e1"].served == [3]
    w.sync.dismiss("e0")
    await w.sync.push(4)
    assert w.engines["e0"].served == [1, 2, 3] and w.engines["e1"].served == [3, 4]


@pytest.mark.parametrize("step", ["join", "stage", "commit", "score", "confirm"])
@pytest.mark.parametrize("error", [None, EngineError("process died"), ConnectionError("actor gone")])
async def test_a_silent_or_dead_engine_is_quarantined_and_the_other_goes_on(step, error) -> None:
    w = World({}, {"step": step, "error": error})
    report = await asyncio.wait_for(w.sync.push(1), 5)
    assert report.committed.keys() == {"e0"} and report.quarantined.keys() == {"e1"}
    assert w.engines["e0"].served[-1] == 1 and w.sync.engines == ("e0",)
    assert ("engine_quarantined", "e1") in [(k, f.get("engine")) for k, f in w.events]
    assert (await w.sync.push(2)).committed.keys() == {"e0"}


async def test_refused_once_is_sent_again_refused_always_is_quarantined() -> None:
    w = World({}, {"step": "stage", "error": WeightError("digest"), "times": 1})
    report = await w.sync.push(1)
    assert report.attempts == 2 and report.committed.keys() == {"e0", "e1"}
    assert w.kinds()[0] == "weights_refused"
    w = World({}, {"step": "stage", "error": WeightError("digest")})
    report = await w.sync.push(1)
    assert report.committed.keys() == {"e0"} and "refused version 1 3 times" in report.quarantined["e1"]
    assert w.engines["e1"].served == []


async def test_a_bystander_of_a_broken_group_is_not_blamed() -> None:
    w = World({"step": "stage", "error": WeightError("group broke"), "times": 1}, {}, fail_sends=1)
    report = await w.sync.push(1)
    assert report.committed.keys() == {"e0", "e1"} and not report.quarantined
    assert w.kinds()[0] == "weights_interrupted" and w.log.count("invite e0,e1") == 2


async def test_a_learner_that_cannot_send_is_an_error_and_blames_no_engine() -> None:
    w = World({}, fail_sends=99)
    with pytest.raises(WeightError, match="version 1 could not be sent after 3 attempts"):
        await w.sync.push(1)
    assert w.sync.engines == ("e0",) and w.engines["e0"].served == [] and "e0 discard" in w.log


async def test_who_does_not_enter_is_named_by_the_learner() -> None:
    w = World({}, {"step": "join", "error": DeadlineError("x", 1)}, missing="e1")
    report = await w.sync.push(1)
    assert report.quarantined.keys() == {"e1"} and report.committed.keys() == {"e0"}


async def test_no_engine_left_is_an_error_that_says_why() -> None:
    w = World({"step": "stage", "error": EngineError("process died")})
    with pytest.raises(WeightError, match=r"no engine is left to serve version 1 \(e0: silent .* process died\)"):
        await w.sync.push(1)
    with pytest.raises(WeightError, match="none was admitted"):
        await w.sync.push(2)


async def test_wrong_logprobs_quarantine_and_say_so() -> None:
    w = World({}, {"logprob": -2.0})
    report = await w.sync.push(1)
    assert report.committed.keys() == {"e0"} and "canary" in report.quarantined["e1"]
    assert "canary_alarm" in w.kinds()
    assert w.engines["e0"].confirmed == [1] and w.engines["e1"].confirmed == [] and "e1 condemn" in w.log
    assert ("weights_committed", "e1") not in [(k, f.get("engine")) for k, f in w.events]


async def test_an_update_that_is_not_due_for_a_canary_is_confirmed_at_once() -> None:
    w = World({})
    w.sync._check.plan = replace(w.sync.canary, every=2)
    for v in (1, 2):
        await w.sync.push(v)
    assert w.engines["e0"].confirmed == [1, 2] and w.log.count("e0 score") == 1


async def test_a_learner_that_dies_before_it_confirms_confirms_nothing() -> None:
    w = World({})

    async def gone(version):
        raise ConnectionError("killed")

    w.sync._check.plan = replace(w.sync.canary, score=gone)
    with pytest.raises(ConnectionError):
        await w.sync.push(1)
    assert w.engines["e0"].served == [1] and w.engines["e0"].confirmed == []


async def test_unchanged_weights_after_a_step_are_alarmed_and_never_served() -> None:
    w = World({})
    await w.sync.push(1, grad_norm=0.5)
    for version, norm in enumerate((0.0, None, float("nan"), float("inf")), 2):  # nothing moved, or nobody knows
        await w.sync.push(version, grad_norm=norm)
    assert "weights_unchanged" not in w.kinds()
    with pytest.raises(WeightError, match="version 6 has the digest of the version before"):
        await w.sync.push(6, grad_norm=0.5)
    assert "weights_unchanged" in w.kinds()
    assert w.engines["e0"].served == [1, 2, 3, 4, 5] and "e0 discard" in w.log


async def test_a_quarantined_engine_is_told() -> None:
    w = World({}, {"step": "commit", "error": WeightError("half loaded")})
    report = await w.sync.push(1)
    assert "e1 condemn" in w.log and "half loaded" in report.quarantined["e1"] and w.engines["e1"].confirmed == []
