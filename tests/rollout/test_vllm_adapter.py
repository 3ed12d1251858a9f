"""Proves, with the real vLLM on CPU, where only adapters travel: after each of 20 updates during generation log-probs
of the engine are the learner's, it holds one adapter, and no request is lost; another base, a whole model, part of an
adapter and layers that are not there are refused before anything is staged; an adapter left out is seen by the canary;
a new engine serves the same from the base on its disk; the bytes that were proven are not altered by loading them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
import torch

from learner.config import LearnerConfig
from learner.packing import Answer, pack
from learner.policy import Inputs, layout_of, load_policy
from learner.weight_publisher import WeightPublisher
from learner.weight_sender import WeightSender
from learner.weights import adapter_weights, base_weights, named_weights
from rollout.canary import Canary
from rollout.engine import SamplingParams
from rollout.errors import WeightError
from rollout.types import Status
from rollout.versions import AdapterSpec, check_spans
from rollout.vllm_engine import VllmEngine, VllmSettings
from rollout.weight_adapter import base_root
from rollout.weight_store import WeightStore
from rollout.weight_stream import spec_of
from tests.rollout.traffic import lived_through_an_update, traffic

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
PROMPT, TOKENS = [72, 101, 108, 108, 111], [32, 119, 111, 114, 108, 100]
RANK, ALPHA = 4, 6.0  # a scale of 1.5, which is neither 1 nor exact in every type


class Learner:
    """A policy with adapters, as a learner has it; `learn` is a step that moves all of them."""

    def __init__(self, path) -> None:
        self.config = LearnerConfig(compute_dtype="float32", lora_rank=RANK, lora_alpha=ALPHA)
        self.policy = load_policy(path, self.config, torch.device("cpu"))
        self.generator = torch.Generator().manual_seed(0)
        self.spec = AdapterSpec(RANK, ALPHA, base_root((w.name, w.whole()) for w in base_weights(self.policy)))

    def learn(self) -> None:
        with torch.no_grad():
            for name, p in self.policy.named_parameters():
                if p.requires_grad:
                    p.add_((0.05 if ".lora_B." in name else 0.01) * torch.randn(p.shape, generator=self.generator))

    def tensors(self):
        return ((w.name, w.whole()) for w in adapter_weights(self.policy))

    def score(self) -> np.ndarray:
        prompt, tokens = np.array(PROMPT, np.int32), np.array(TOKENS, np.int32)
        answer = Answer(0, 0, 0, prompt, tokens, np.ones(len(tokens), bool))
        (batch,) = pack([answer], token_budget=1 << 20, layout=layout_of(self.config))
        with torch.no_grad():
            return self.policy(Inputs.of(batch, torch.device("cpu")), 1.0).logprobs.numpy()


def settings(path, **more) -> VllmSettings:
    small = {"max_model_len": 256, "kv_cache_bytes": 32 << 20, "timeout_s": 60.0, "adapter_rank": RANK}
    return VllmSettings(str(path), "float32", **{**small, **more})


class Rig:
    """A running engine and a learner on the gloo plane."""

    def __init__(self, path) -> None:
        self.path, self.learner, self.version = path, Learner(path), 0
        self.engine = VllmEngine(settings(path, bucket_bytes=10_000))
        self.sender = WeightSender(self.learner.tensors, adapter=self.learner.spec, bucket_bytes=10_000, timeout_s=60)

    async def update(self):
        if not self.sender.in_group:
            rdv = self.sender.invite(["e0"])
            await asyncio.gather(asyncio.to_thread(self.sender.enter), self.engine.join(rdv["e0"]))
        self.version += 1
        manifest = self.sender.announce(self.version)
        sent, _ = await asyncio.gather(
            asyncio.to_thread(self.sender.send, manifest), self.engine.stage_weights(manifest)
        )
        await self.engine.commit_weights(self.version, sent.root)
        return sent


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tiny_dir):
    rig = Rig(tiny_dir)
    await rig.engine.start()
    yield rig
    rig.sender.close()
    await rig.engine.close()


async def test_before_the_first_version_the_engine_serves_the_base(rig) -> None:
    seen = await rig.engine.score(PROMPT, TOKENS, 1.0)
    assert np.abs(seen - rig.learner.score()).max() < 1e-4  # peft's adapters begin as nothing
    assert await rig.engine.adapters() == [1]


async def test_twenty_updates_during_generation(rig) -> None:
    scores = [rig.learner.score()]
    async with traffic(rig.engine) as answers:
        for _ in range(20):
            rig.learner.learn()
            sent = await rig.update()
            scores.append(rig.learner.score())
            assert np.abs(await rig.engine.score(PROMPT, TOKENS, 1.0) - scores[-1]).max() < 1e-4, rig.version
            assert np.abs(scores[-1] - scores[-2]).mean() > 1e-2  # or the test would prove nothing
            assert await rig.engine.adapters() == [1]
    whole = sum(w.whole().nbytes for w in named_weights(rig.learner.policy))
    assert sent.nbytes < whole / 4  # of a tiny model; adapters grow with the width, weights with its square
    for answer in answers:
        assert answer.token_ids[-1] == 258 if answer.status is Status.FINISHED else len(answer.token_ids) == 40
        assert answer.status is not Status.FAILED
        check_spans(answer.versions, len(answer.token_ids))
    assert lived_through_an_update(answers) >= 20, "the test proved nothing"


async def test_sampled_answers_are_those_of_the_learner(rig) -> None:
    """Decoding, and not only scoring, goes through the adapter; answers are those of the merged model."""
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(rig.path, dtype=torch.float32)
    merged.load_state_dict({w.name: w.whole() for w in named_weights(rig.learner.policy)}, strict=False)
    for a in await rig.engine.generate("sampled", PROMPT, SamplingParams(16, temperature=0.7, seed=3), 4):
        ids = torch.tensor([PROMPT + a.token_ids.tolist()])
        with torch.no_grad():
            rows = torch.log_softmax(merged(ids).logits[0, len(PROMPT) - 1 : -1].double() / 0.7, -1)
        wanted = rows.gather(1, ids[0, len(PROMPT) :, None]).squeeze(1).numpy()
        assert np.abs(wanted - a.logprobs).max() < 2e-4


async def test_an_adapter_left_out_is_seen_by_the_canary(rig) -> None:
    wanted, canary = [rig.learner.score()], Canary(tolerance=0.01)
    assert not canary.read("e0", 1, [await rig.engine.score(PROMPT, TOKENS, 1.0)], wanted).alarm
    adapter, rig.engine._adapter = rig.engine._adapter, None
    try:
        assert "tolerance" in canary.read("e0", 2, [await rig.engine.score(PROMPT, TOKENS, 1.0)], wanted).alarm
    finally:
        rig.engine._adapter = adapter
    assert not canary.read("e0", 3, [await rig.engine.score(PROMPT, TOKENS, 1.0)], wanted).alarm


async def test_what_is_not_this_engines_adapter_is_refused_before_it_is_staged(rig) -> None:
    good = rig.sender.announce(99)
    whole = tuple(spec_of(w.name, w.whole()) for w in base_weights(rig.learner.policy))
    layer = good.tensors[0].name.rpartition(".lora_A.")[0]
    bad = {
        "announced as a whole model, this engine takes adapters": replace(good, tensors=whole, adapter=None),
        "is no matrix of an adapter": replace(good, tensors=whole),
        "the engine's is": replace(good, adapter=replace(rig.learner.spec, base="0" * 32)),
        "has room for 4": replace(good, adapter=replace(rig.learner.spec, rank=8)),
        "only one of the two matrices": replace(good, tensors=good.tensors[1:]),
        "which this engine does not have": replace(
            good, tensors=tuple(replace(t, name=t.name.replace(layer, layer + "x")) for t in good.tensors)
        ),
        "the engine computes in float32": replace(
            good, tensors=tuple(replace(t, dtype="bfloat16") for t in good.tensors)
        ),
        r"wanted \[": replace(good, tensors=tuple(replace(t, shape=t.shape[::-1]) for t in good.tensors)),
    }
    before = await rig.engine.score(PROMPT, TOKENS, 1.0)
    for reason, manifest in bad.items():
        with pytest.raises(WeightError, match=reason):
            await rig.engine.stage_weights(manifest)
    assert np.array_equal(before, await rig.engine.score(PROMPT, TOKENS, 1.0))
    rig.learner.learn()
    await rig.update()  # and the next good one is served
    assert np.abs(await rig.engine.score(PROMPT, TOKENS, 1.0) - rig.learner.score()).max() < 1e-4


async def test_a_new_engine_serves_the_same_from_a_store(tied_dir, tmp_path) -> None:
    """Also: the spooled bytes survive being loaded, for the next delta builds on them; and a tied head is the same."""
    learner = Learner(tied_dir)
    publisher = WeightPublisher(learner.tensors, WeightStore(str(tmp_path / "store")), learner.spec)
    served = []
    for life in range(2):
        engine = VllmEngine(settings(tied_dir, plane="store", store_url=str(tmp_path / "store")))
        await engine.start()
        for version in (3 * life + 1, 3 * life + 2, 3 * life + 3):
            learner.learn()
            manifest = publisher.announce(version)
            sent, receipt = await asyncio.gather(asyncio.to_thread(publisher.send, manifest), engine.stage(manifest))
            assert receipt.root == sent.root
            await engine.commit_weights(version, sent.root)
            assert np.abs(await engine.score(PROMPT, TOKENS, 1.0) - learner.score()).max() < 1e-4
            assert await engine.adapters() == [1]
        served.append(version)
        await engine.close()
    assert served == [3, 6]
