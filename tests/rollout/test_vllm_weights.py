"""Proves, with the real vLLM on CPU and a model with a tied output head: vLLM's reload leaves the head stale (the day
it no longer does is noticed), the digests do not see it, the canary does, and the mend ends it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from learner.weight_publisher import WeightPublisher
from learner.weight_sender import WeightSender
from rollout.canary import Canary
from rollout.engine import SamplingParams
from rollout.errors import WeightError
from rollout.versions import AdapterSpec
from rollout.vllm_engine import VllmEngine, VllmSettings
from rollout.vllm_weights import BACKENDS, mend_packed, packed_state, register
from rollout.weight_store import WeightStore

PROMPT, TOKENS = [72, 101, 108, 108, 111], [32, 119, 111, 114, 108, 100]


@pytest.mark.timeout(180)
async def test_the_stale_head_is_caught_by_the_canary_and_ended_by_the_mend(tied_dir, made, tmp_path) -> None:
    engine = VllmEngine(
        VllmSettings(str(tied_dir), "float32", max_model_len=256, kv_cache_bytes=32 << 20, bucket_bytes=50_000)
    )
    await engine.start()
    weights = made.reseeded(made.load(tied_dir), 2)
    sender = WeightSender(lambda: iter(weights.items()), bucket_bytes=50_000, timeout_s=20)
    rdv = sender.invite(["e0"])
    await asyncio.gather(asyncio.to_thread(sender.enter), engine.join(rdv["e0"]))
    wanted = [made.log_probs(made.save(tmp_path / "new", tied_dir, weights), PROMPT, TOKENS)]
    readings = {}
    for version, mend in ((1, False), (2, True)):
        object.__setattr__(engine.settings, "mend", mend)
        manifest = sender.announce(version)
        sent, receipt = await asyncio.gather(asyncio.to_thread(sender.send, manifest), engine.stage(manifest))
        await engine.commit_weights(version, sent.root)
        assert receipt.root == sent.root  # the digests see nothing wrong
        seen = [await engine.score(PROMPT, TOKENS, 1.0)]
        readings[mend] = Canary(tolerance=0.05).read("e0", version, seen, wanted)
    assert "tolerance" in readings[False].alarm and readings[False].mean_abs > 0.1
    assert readings[True].alarm == "" and readings[True].mean_abs < 1e-4
    (answer,) = await engine.generate("g", PROMPT, SamplingParams(8, temperature=1.0, seed=1), 1)
    assert answer.versions[0].version == 2
    sender.close()
    await engine.close()


@pytest.mark.timeout(180)
async def test_versions_pulled_from_a_store_are_served(emitter_dir, made, tmp_path) -> None:
    store, base, version = WeightStore(str(tmp_path / "store")), made.load(emitter_dir), [0]
    publisher = WeightPublisher(lambda: made.emitter(base, version[0]).items(), store)
    engine = VllmEngine(
        VllmSettings(
            str(emitter_dir),
            "float32",
            max_model_len=256,
            kv_cache_bytes=32 << 20,
            plane="store",
            store_url=str(tmp_path / "store"),
        )
    )
    await engine.start()
    for version[0] in (1, 2, 3):
        manifest = publisher.announce(version[0])
        sent, receipt = await asyncio.gather(asyncio.to_thread(publisher.send, manifest), engine.stage(manifest))
        assert receipt.root == sent.root
        await engine.commit_weights(version[0], sent.root)
        (answer,) = await engine.generate(f"v{version[0]}", PROMPT, SamplingParams(6, temperature=0.0), 1)
        assert set(answer.token_ids.tolist()) == {version[0]} and answer.versions[0].version == version[0]
    assert store.manifest(3).base == 2  # the second and third came as deltas on what the engine had
    with pytest.raises(WeightError, match="is an adapter, this engine takes whole models"):
        await engine.stage(replace(publisher.announce(4), adapter=AdapterSpec(4, 8.0, "00")))
    assert await engine.adapters() == []
    await engine.close()


class Packing(torch.nn.Module):
    """A layer as vLLM has it on CPU: multiplies with a private copy made by its quant_method."""

    class Method:
        def process_weights_after_loading(self, layer) -> None:
            private = layer.weight.detach().clone()
            layer.cpu_linear = lambda x: x @ private.T

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight, self.quant_method = weight, self.Method()
        self.quant_method.process_weights_after_loading(self)


def test_the_mend_repacks_what_the_reload_passed_over_and_nothing_else() -> None:
    shared = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    model = torch.nn.ModuleDict({"embed": Packing(shared), "head": Packing(shared)})
    before = packed_state(model)
    shared.data.fill_(1.0)
    model["embed"].quant_method.process_weights_after_loading(model["embed"])  # the reload owns the embedding only
    kernel = model["embed"].cpu_linear
    assert model["head"].cpu_linear(torch.ones(1, 2)).sum() == 0
    assert mend_packed(model, before) == ["head"]
    assert model["head"].cpu_linear(torch.ones(1, 2)).sum() == 4
    assert model["embed"].cpu_linear is kernel is model["head"].cpu_linear  # one packed copy serves both


def test_the_mend_repacks_a_module_that_shares_with_nobody() -> None:
    model = torch.nn.ModuleDict({"head": Packing(torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False))})
    before = packed_state(model)
    model["head"].weight.data.fill_(1.0)
    assert mend_packed(model, before) == ["head"]
    assert model["head"].cpu_linear(torch.ones(1, 2)).sum() == 4


def test_a_layer_that_got_nothing_and_cannot_be_repacked_is_an_error() -> None:
    layer = Packing(torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False))
    model = torch.nn.ModuleDict({"proj": layer})
    before = packed_state(model)
    layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    with pytest.raises(Exception, match="proj and 0 more got no new weights"):
        mend_packed(model, before)


def test_register_is_idempotent() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    register()
    assert set(BACKENDS.values()) <= set(WeightTransferEngineFactory._registry)
