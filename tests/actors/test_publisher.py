"""Proves what may happen beside a publication: the update waits until nobody reads the weights, and for nothing more;
what is sent is what the learner had; ZeRO-3 reads inside `begin`; a failure is heard and blocks nobody."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actors import publisher as module
from actors.publisher import Publisher
from actors.weight_planes import Plane
from learner.weight_epochs import Sent
from rollout.canary import CanaryText
from rollout.config import WeightsConfig
from rollout.engine import CommitReport, Rendezvous
from rollout.errors import EngineError, NoEngine, WeightError
from rollout.versions import WeightManifest

DEADLINE_S = 10.0


class Learner:
    """One weight; `step` is what an optimizer step does: ask first, then write."""

    def __init__(self, zero_stage: int = 1) -> None:
        self.config = SimpleNamespace(zero_stage=zero_stage)
        self.weight = torch.zeros(4)
        self.before_update = lambda: None

    def state_tensors(self):
        yield "w", self.weight

    def score(self, prompt, tokens, temperature):
        return np.zeros(len(tokens), np.float32)

    def step(self) -> None:
        self.before_update()
        self.weight += 1


class Sender:
    """Reads the weights in `send`, as slowly as the test wants."""

    def __init__(self, source) -> None:
        self.source, self.sent, self.reading = source, [], threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.fails = False

    def invite(self, members):
        return {n: Rendezvous(1, "h", 1, i, len(members) + 1, 1.0) for i, n in enumerate(members, 1)}

    def enter(self): ...

    def announce(self, version):
        return WeightManifest(version, ())

    def send(self, manifest):
        for _, tensor in self.source():
            self.reading.set()
            assert self.go_on.wait(DEADLINE_S)
            if self.fails:
                raise WeightError("the disk is full")
            self.sent.append(tensor.clone())
        return Sent(manifest, str(float(self.sent[-1][0])), 16, 0.0)

    def close_group(self): ...


class Engine:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.commit_now = threading.Event()
        self.commit_now.set()

    async def join(self, rendezvous): ...

    async def stage_weights(self, manifest):
        return 0.0

    async def commit_weights(self, version, digest=""):
        assert self.commit_now.wait(DEADLINE_S)
        self.calls.append(f"commit {version}")
        return CommitReport(version, 0.1, 0.1)

    async def confirm_weights(self, version):
        self.calls.append(f"confirm {version}")

    async def condemn(self, reason): ...
    async def discard_weights(self): ...

    async def score(self, prompt_ids, token_ids, temperature):
        return np.zeros(len(token_ids), np.float32)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch):
    made: list[Publisher] = []

    def make(zero_stage: int = 1):
        learner, events = Learner(zero_stage), []
        monkeypatch.setattr(module, "open_sender", lambda plane, source, config, adapter: Sender(source))
        texts = (CanaryText((1,), (2,)),)
        publisher = Publisher(
            learner, Plane("gloo"), WeightsConfig(timeout_s=5), 0, 1, lambda kind, **f: events.append(kind), texts
        )
        engine = Engine()
        publisher.admit("e0", engine)
        made.append(publisher)
        return SimpleNamespace(
            learner=learner, publisher=publisher, engine=engine, sender=publisher._sync.sender._sender, events=events
        )

    yield make
    for publisher in made:
        publisher.close()


def in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_the_update_waits_for_the_reading_and_what_was_sent_is_what_the_learner_had(scene) -> None:
    s = scene()
    s.sender.go_on.clear()
    publication = s.publisher.begin(1)
    assert s.sender.reading.wait(DEADLINE_S)
    update = in_thread(s.learner.step)
    update.join(0.2)
    assert update.is_alive() and s.learner.weight[0] == 0, "the optimizer wrote under the sender"
    s.sender.go_on.set()
    update.join(DEADLINE_S)
    assert s.learner.weight[0] == 1 and s.publisher.blocked_s() > 0.1 and s.publisher.blocked_s() == 0.0
    assert publication.result(DEADLINE_S)["weights/bytes"] == 16 and s.sender.sent[0][0] == 0


def test_the_update_does_not_wait_for_the_engines_to_load(scene) -> None:
    s = scene()
    s.engine.commit_now.clear()
    live: list[dict] = []
    publication = s.publisher.begin(1, None, lambda served, found: live.append(found))
    update = in_thread(s.learner.step)
    update.join(DEADLINE_S)
    assert s.learner.weight[0] == 1 and not publication.done() and not live
    s.engine.commit_now.set()
    publication.result(DEADLINE_S)
    assert s.engine.calls == ["commit 1", "confirm 1"] and len(live) == 1


def test_several_updates_of_one_step_ask_once_and_the_next_version_ends_it(scene) -> None:
    s = scene()
    for version in (1, 2):
        s.publisher.begin(version).result(DEADLINE_S)
        s.learner.step()
        s.learner.step()
        assert s.publisher._weights.locked(), "a delivery could read between two updates of one step"
    assert [float(t[0]) for t in s.sender.sent] == [0.0, 2.0]
    s.publisher.updated(3)
    assert not s.publisher._weights.locked()


def test_a_failed_delivery_is_heard_and_blocks_no_update(scene) -> None:
    s = scene()
    s.sender.fails = True
    live: list[dict] = []
    publication = s.publisher.begin(1, None, lambda served, found: live.append(found))
    with pytest.raises(WeightError, match="the disk is full"):
        publication.result(DEADLINE_S)
    s.learner.step()
    assert s.learner.weight[0] == 1 and not live and not s.engine.calls


def test_under_zero_3_the_weights_are_read_before_begin_returns(scene) -> None:
    s = scene(zero_stage=3)
    s.engine.commit_now.clear()
    publication = s.publisher.begin(1)
    assert len(s.sender.sent) == 1 and not publication.done()
    s.engine.commit_now.set()
    publication.result(DEADLINE_S)


def test_what_follows_a_live_version_may_fail_the_publication(scene) -> None:
    s = scene()

    def release(served, found) -> None:
        raise ConnectionError("the queue is gone")

    with pytest.raises(ConnectionError, match="the queue is gone"):
        s.publisher.begin(1, None, release).result(DEADLINE_S)


class Dead(Engine):
    async def stage_weights(self, manifest):
        raise EngineError("its process is gone")


def test_a_newcomer_serves_the_present_version_and_nobody_else_is_disturbed(scene) -> None:
    s = scene()
    s.publisher.begin(1).result(DEADLINE_S)
    newcomer = Engine()
    s.publisher.bring("e1", newcomer).result(DEADLINE_S)
    assert newcomer.calls == ["commit 1", "confirm 1"] and s.engine.calls == ["commit 1", "confirm 1"]
    s.publisher.begin(2).result(DEADLINE_S)
    assert newcomer.calls[2:] == ["commit 2", "confirm 2"] and s.engine.calls[2:] == ["commit 2", "confirm 2"]


def test_a_newcomer_is_not_brought_half_an_update(scene) -> None:
    s = scene()
    s.publisher.begin(1).result(DEADLINE_S)
    s.learner.step()
    newcomer = Engine()
    brought = s.publisher.bring("e1", newcomer)
    s.learner.step()
    assert not brought.done() and not newcomer.calls
    s.publisher.updated(2)
    brought.result(DEADLINE_S)
    assert newcomer.calls[0] == "commit 2" and [float(t[0]) for t in s.sender.sent] == [0.0, 2.0]
    s.publisher.begin(2, grad_norm=1.0).result(DEADLINE_S)  # the same bytes again, and rightly so
    assert "weights_unchanged" not in s.events and s.engine.calls[-1] == "confirm 2"


def test_the_canary_of_a_version_on_its_way_is_not_mixed_up_with_the_next(scene) -> None:
    s = scene()
    s.publisher.begin(1).result(DEADLINE_S)
    s.engine.commit_now.clear()
    publication = s.publisher.begin(2)
    s.learner.step()
    s.learner.score = lambda prompt, tokens, temperature: np.full(len(tokens), -9.0, np.float32)
    s.publisher.updated(3)
    s.engine.commit_now.set()
    assert publication.result(DEADLINE_S)["weights/canary"] == 0.0 and "canary_alarm" not in s.events


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_version_without_an_engine_is_made_live_by_the_one_that_comes(scene, when: str) -> None:
    """Also if the learner has gone on meanwhile, as far as it can: the next version waits for this one."""
    s = scene()
    s.publisher.begin(1).result(DEADLINE_S)
    s.publisher.dismiss("e0")
    live: list[int] = []
    publication = s.publisher.begin(2, None, lambda served, found: live.append(served))
    if when == "after":
        s.learner.step()  # nobody reads: the update need not wait
        s.publisher.updated(3)
    newcomer = Engine()
    s.publisher.bring("e0", newcomer).result(DEADLINE_S)
    assert publication.result(DEADLINE_S)["weights/engines"] == 1
    assert live == [2 if when == "before" else 3] and newcomer.calls[0] == f"commit {live[0]}"


def test_before_any_version_was_served_no_engine_is_an_error(scene) -> None:
    s = scene()
    s.publisher.dismiss("e0")
    with pytest.raises(NoEngine, match="none was admitted"):
        s.publisher.begin(0).result(DEADLINE_S)


def test_who_is_lost_is_said_until_it_is_back_and_a_bad_newcomer_is_refused_with_the_reason(scene) -> None:
    s = scene()
    s.publisher.begin(1).result(DEADLINE_S)
    with pytest.raises(NoEngine, match="its process is gone"):
        s.publisher.bring("e1", Dead()).result(DEADLINE_S)
    assert "its process is gone" in s.publisher.lost()["e1"] and s.publisher.begin(2).result(DEADLINE_S)
    s.publisher.bring("e1", Engine()).result(DEADLINE_S)
    assert not s.publisher.lost()


def test_under_zero_3_a_newcomer_takes_part_in_the_next_publication(scene) -> None:
    s = scene(zero_stage=3)
    s.publisher.begin(1).result(DEADLINE_S)
    newcomer = Engine()
    brought = s.publisher.bring("e1", newcomer)
    assert not brought.done()
    s.publisher.begin(2).result(DEADLINE_S)
    assert brought.result(DEADLINE_S) and newcomer.calls == ["commit 2", "confirm 2"]
