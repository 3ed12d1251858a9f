"""Proves, without a GPU: the checksum sees flips, exchanges, shifts and cuts and is the same however the tensor lies;
the NCCL engine makes vLLM's calls in the right order, resumes only weights whose sums are the learner's, and serves
nothing after a refusal. That NCCL itself works is not proven here."""

from __future__ import annotations

import pytest
import torch

from learner.nccl_sender import NcclSender
from rollout.errors import EngineError, WeightError
from rollout.vllm_engine import VllmSettings, engine_arguments, vllm_engine
from rollout.vllm_nccl import NcclEngine
from rollout.weight_checksum import checksum, summed


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


class FakeLlm:
    """Records vLLM's calls; `received` is what its workers loaded."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.received: dict[str, str] = {}
        self.errored = False
        self.output_processor = self
        self.request_states: dict[str, None] = {"r1": None}
        self.engine_core = self

    def __getattr__(self, name: str):
        async def call(*args, **kwargs):
            self.log.append(name)
            return [self.received] if name == "collective_rpc" else None

        return call


class FakeTrainer:
    def __init__(self, llm: FakeLlm, alter) -> None:
        self.llm, self.alter = llm, alter

    def send(self, tensors) -> None:
        self.llm.received = {}
        for _ in summed(((n, self.alter(t)) for n, t in tensors), self.llm.received):
            pass

    def close(self) -> None:
        self.llm.log.append("closed")


def pair(alter=lambda t: t):
    engine = vllm_engine(VllmSettings("m", plane="nccl"))
    assert isinstance(engine, NcclEngine)
    engine._llm = llm = FakeLlm()
    weights = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    sender = NcclSender(lambda: weights.items(), workers=2, trainer=lambda *a: FakeTrainer(llm, alter))
    return engine, llm, sender


async def test_the_order_of_calls(monkeypatch) -> None:
    engine, llm, sender = pair()
    rdv = sender.invite(["e0", "e1"])
    assert (rdv["e0"].rank, rdv["e1"].rank, rdv["e0"].world_size) == (1, 3, 5)
    sender.enter()
    manifest = sender.announce(1)
    sent = sender.send(manifest)
    receipt = await engine.stage(manifest)
    assert receipt.root == sent.root
    report = await engine.commit_weights(1, sent.root)
    assert report.version == engine.version == 1 and engine.gauges()["engine_broken"] == 0
    assert llm.log == [
        "pause_scheduler_async",
        "start_weight_update",
        "update_weights",
        "collective_rpc",
        "finish_weight_update",
        "resume_generation",
    ]


async def test_other_sums_are_refused_and_nothing_is_served() -> None:
    engine, llm, sender = pair(alter=lambda t: t + 1)
    sender.invite(["e0"])
    sender.enter()
    manifest = sender.announce(1)
    sent = sender.send(manifest)
    await engine.stage(manifest)
    with pytest.raises(WeightError, match="refused"):
        await engine.commit_weights(1, sent.root)
    assert llm.log[-2:] == ["abort", "resume_generation"] and engine.version == 0
    with pytest.raises(EngineError, match="half loaded"):
        engine._running()
    with pytest.raises(WeightError, match="not what was received last"):
        await engine.commit_weights(1)


def test_the_back_end_is_ours_on_every_plane() -> None:
    backends = {p: engine_arguments(VllmSettings("m", plane=p))["weight_transfer_config"] for p in ("gloo", "nccl")}
    assert backends == {"gloo": {"backend": "headrace"}, "nccl": {"backend": "headrace_nccl"}}
