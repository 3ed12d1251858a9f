"""Proves, without a GPU: the checksum sees flips, exchanges, shifts and cuts and is the same however the tensor lies;
the NCCL engine makes vLLM's calls in the right order and cuts the stream as the sender does, serves only weights whose
sums are the learner's, and keeps requests standing over a refusal. That NCCL itself works is not proven here."""

from __future__ import annotations

import asyncio

import pytest
import torch

from actors.weight_planes import Plane, open_sender
from learner.nccl_sender import NcclSender
from rollout.config import WeightsConfig
from rollout.engine import SamplingParams
from rollout.errors import EngineError, WeightError
from rollout.vllm_engine import VllmSettings, engine_arguments, vllm_engine
from rollout.vllm_nccl import NcclEngine
from rollout.weight_checksum import checksum, summed
from tests.rollout.fake_llm import FakeLlm


def test_the_checksum_sees_what_matters() -> None:
    t = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    seen = {checksum(t)}
    flipped, swapped = t.clone(), t.clone()
    flipped.view(torch.int16)[501] ^= 1
    swapped[10:14] = t[20:24]
    swapped[20:24] = t[10:14]
    for other in (flipped, swapped, t[:-1], t[1:], t.roll(2), torch.zeros(1000), torch.zeros(1001), torch.zeros(0)):
        assert checksum(other) not in seen
        seen.add(checksum(other))
    assert checksum(t.reshape(10, 100).T.contiguous().T) == checksum(t)  # the order of elements counts, not the strides


class FakeTrainer:
    def __init__(self, llm: FakeLlm, alter) -> None:
        self.llm, self.alter = llm, alter

    def send(self, tensors) -> None:
        self.llm.received = {}
        for _ in summed(((n, self.alter(t)) for n, t in tensors), self.llm.received):
            pass

    def close(self) -> None:
        self.llm.log.append("closed")


class Rig:
    """A sender to two engines of two workers, one of which is looked at; `alter` is what happens on the way."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.alter = lambda tensor: tensor
        engine = vllm_engine(VllmSettings("m", plane="nccl", timeout_s=timeout_s))
        assert isinstance(engine, NcclEngine)
        self.engine, self.llm = engine, FakeLlm()
        engine._llm = self.llm
        self.weights = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
        self.asked: list[tuple] = []
        self.sender = NcclSender(self.source, workers=2, trainer=self.open)

    def source(self):
        return self.weights.items()

    def open(self, *asked) -> FakeTrainer:
        self.asked.append(asked)
        return FakeTrainer(self.llm, lambda t: self.alter(t))

    async def stage(self, version: int):
        rdv = self.sender.invite(["e0", "e1"])
        self.sender.enter()
        manifest = self.sender.announce(version)
        sent = self.sender.send(manifest)
        return rdv, sent, await self.engine.stage(manifest)


async def test_the_order_of_calls() -> None:
    rig = Rig()
    rdv, sent, receipt = await rig.stage(1)
    assert (rdv["e0"].rank, rdv["e1"].rank, rdv["e0"].world_size) == (1, 3, 5)
    assert receipt.root == sent.root
    report = await rig.engine.commit_weights(1, sent.root)
    assert report.version == rig.engine.version == 1 and rig.engine.gauges()["engine_broken"] == 0
    assert report.stall_s >= receipt.seconds + report.load_s  # generation stood still from the first byte on
    assert rig.llm.log == [
        "pause_scheduler_async",
        "headrace_begin",
        "update_weights",
        "sums",
        "finish_weight_update",
        "resume_generation",
    ]


async def test_both_sides_cut_the_stream_alike() -> None:
    """vLLM cuts its broadcasts by the size that each side is told."""
    told = []

    class Llm(FakeLlm):
        async def init_weight_transfer_engine(self, request) -> None:
            told.append(request.init_info["packed_buffer_size_bytes"])

    rig = Rig()
    rig.engine._llm = Llm()
    sender = open_sender(Plane("nccl"), rig.source, WeightsConfig(bucket_mb=8), None)
    sender._trainer = rig.open
    await rig.engine.join(sender.invite(["e0"])["e0"])
    sender.enter()
    assert told == [rig.asked[0][-1]] == [8 << 20]


async def test_what_the_learner_did_not_announce_is_not_sent() -> None:
    rig = Rig()
    rig.sender.announce(1)
    rig.weights = {"a": torch.ones(3), "b": torch.zeros(2, 3)}
    with pytest.raises(WeightError, match="yielded b float32"):
        await rig.stage(1)


async def test_other_sums_are_refused_and_requests_stand_until_the_next_attempt() -> None:
    rig = Rig()
    rig.alter = lambda t: t + 1
    _, sent, _ = await rig.stage(1)
    with pytest.raises(WeightError, match="refused"):
        await rig.engine.commit_weights(1, sent.root)
    await rig.engine.discard_weights()
    with pytest.raises(EngineError, match="half loaded"):
        rig.engine._running()
    with pytest.raises(WeightError, match="not what was received last"):
        await rig.engine.commit_weights(1)
    assert not {"abort", "resume_generation"} & set(rig.llm.log) and rig.engine.version == 0
    rig.alter = lambda t: t
    _, sent, _ = await rig.stage(1)
    await rig.engine.commit_weights(1, sent.root)
    assert rig.engine.version == 1 and rig.llm.log.count("pause_scheduler_async") == 1
    assert "abort" not in rig.llm.log and rig.llm.log[-1] == "resume_generation"


async def test_half_loaded_weights_make_no_token_when_nobody_comes_again() -> None:
    rig = Rig(timeout_s=0.05)
    rig.alter = lambda t: t + 1
    _, sent, _ = await rig.stage(1)
    waiting = asyncio.create_task(rig.engine.score([1], [2], 1.0))  # came during the pause: it waits
    with pytest.raises(WeightError, match="refused"):
        await rig.engine.commit_weights(1, sent.root)
    with pytest.raises(EngineError, match="serves nothing: version 1 is half loaded"):
        await asyncio.wait_for(waiting, 10)
    assert rig.llm.log[-2:] == ["abort", "resume_generation"]
    with pytest.raises(EngineError, match="half loaded"):
        await rig.engine.generate("r2", [1], SamplingParams(1), 1)
    rig.alter = lambda t: t
    _, sent, _ = await rig.stage(2)
    await rig.engine.commit_weights(2, sent.root)
    assert rig.engine._running() and rig.engine.version == 2


def test_the_back_end_is_ours_on_every_plane() -> None:
    planes = ("gloo", "store", "nccl", "ipc")
    backends = {p: engine_arguments(VllmSettings("m", plane=p))["weight_transfer_config"]["backend"] for p in planes}
    assert backends == {"gloo": "headrace", "store": "headrace", "nccl": "headrace_nccl", "ipc": "headrace_ipc"}
