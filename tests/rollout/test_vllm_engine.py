"""Proves, with the real vLLM on CPU and a tiny model whose weights make it emit its own version:

20 updates during continuous generation lose no request, and every token carries the version that made it; log-probs
are those of log-softmax(logits / temperature); stop strings stay in the tokens; refused, failed and abandoned updates
leave the engine in a named state; a pause ends by itself; a killed engine process is an error, not a hang.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch

from learner.weight_sender import WeightSender
from rollout.engine import SamplingParams
from rollout.errors import ConfigError, DeadlineError, EngineError, WeightError
from rollout.types import Status
from rollout.versions import check_spans
from rollout.vllm_engine import VllmEngine, VllmSettings
from tests.rollout.traffic import lived_through_an_update, traffic

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
BUCKET = 50_000  # the tiny model has 430 KB: nine buckets
GREEDY = SamplingParams(24, temperature=0.0)


class Rig:
    """A running engine, a sender, and what the learner would send."""

    def __init__(self, path, made, **settings) -> None:
        self.events: list[str] = []
        defaults = {"dtype": "float32", "max_model_len": 256, "kv_cache_bytes": 32 << 20, "bucket_bytes": BUCKET}
        self.engine = VllmEngine(
            VllmSettings(str(path), **{**defaults, "timeout_s": 20.0, **settings}),
            lambda kind, **fields: self.events.append(kind),
        )
        self.made, self.base = made, made.load(path)
        self.weights = dict(self.base)
        self.sender = WeightSender(lambda: iter(self.weights.items()), bucket_bytes=BUCKET, timeout_s=20)

    async def form(self) -> None:
        rdv = self.sender.invite(["e0"])
        await asyncio.gather(asyncio.to_thread(self.sender.enter), self.engine.join(rdv["e0"]))

    async def update(self, version: int):
        if not self.sender.in_group:
            await self.form()
        manifest = self.sender.announce(version)
        sent, _ = await asyncio.gather(
            asyncio.to_thread(self.sender.send, manifest), self.engine.stage_weights(manifest)
        )
        return await self.engine.commit_weights(version, sent.root)

    async def close(self) -> None:
        self.sender.close()
        await self.engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(emitter_dir, made):
    rig = Rig(emitter_dir, made)
    await rig.engine.start()
    yield rig
    await rig.close()


async def test_twenty_updates_during_generation_with_exact_spans(rig) -> None:
    async with traffic(rig.engine) as answers:
        for version in range(1, 21):
            rig.weights = rig.made.emitter(rig.base, version)
            report = await rig.update(version)
            assert report.version == version == rig.engine.version
    for answer in answers:
        assert len(answer.token_ids) == 40 and answer.status is Status.TRUNCATED  # nothing lost, nothing cut
        check_spans(answer.versions, 40)
        made_by = [s.version for s in answer.versions for _ in range(s.start, s.end)]
        assert made_by == answer.token_ids.tolist()  # the token IS the version of the weights
    assert lived_through_an_update(answers) >= 20, "the test proved nothing"


async def test_what_is_refused_is_not_served(rig) -> None:
    version = rig.engine.version
    rig.weights = rig.made.emitter(rig.base, 200)
    manifest = rig.sender.announce(version + 1)
    await asyncio.gather(asyncio.to_thread(rig.sender.send, manifest), rig.engine.stage_weights(manifest))
    with pytest.raises(WeightError, match=f"cannot commit version {version + 2}"):
        await rig.engine.commit_weights(version + 2)
    with pytest.raises(WeightError, match="the learner sent deadbeef; refused"):
        await rig.engine.commit_weights(version + 1, "deadbeef")
    with pytest.raises(WeightError, match="cannot commit"):
        await rig.engine.commit_weights(version + 1)
    (answer,) = await rig.engine.generate("after-refusal", [65], GREEDY, 1)
    assert set(answer.token_ids) == {version} and rig.engine.version == version


async def test_a_sender_that_never_sends_ends_at_the_deadline_and_decoding_goes_on(rig) -> None:
    await rig.form()
    rig.engine.settings = replace(rig.engine.settings, timeout_s=1.0)
    staging = asyncio.create_task(rig.engine.stage_weights(rig.sender.announce(99)))
    (answer,) = await rig.engine.generate("beside-staging", [65], GREEDY, 1)
    assert len(answer.token_ids) == GREEDY.max_tokens and not staging.done()
    with pytest.raises(DeadlineError):
        await staging
    rig.engine.settings = replace(rig.engine.settings, timeout_s=20.0)
    rig.sender.close_group()
    await rig.engine.discard_weights()


async def test_a_load_that_fails_serves_nothing_until_the_next_commit(rig) -> None:
    rig.sender._layout._known = None  # another model, on purpose
    unknown = {"model.layers.1.self_attn.v_proj.weight": "model.layers.7.self_attn.v_proj.weight"}
    rig.weights = {unknown.get(n, n): t for n, t in rig.base.items()}  # with q and k, but no v, of a layer
    in_flight = asyncio.create_task(rig.engine.generate("victim", [65], SamplingParams(200), 1))
    with pytest.raises(WeightError, match="loading version 30 failed"):
        await rig.update(30)
    with pytest.raises(EngineError, match="serves nothing"):
        await rig.engine.generate("no", [65], GREEDY, 1)
    (victim,) = await asyncio.wait_for(in_flight, 20)
    assert victim.status is Status.FAILED and len(victim.token_ids) == 0
    rig.sender._layout._known = None
    rig.weights = rig.made.reseeded(rig.base, 4)
    await rig.update(31)
    wanted = rig.made.log_probs(rig.engine.settings.model_dir, [65, 66], [67, 68, 69], rig.weights)
    seen = await rig.engine.score([65, 66], [67, 68, 69], 1.0)
    assert np.abs(wanted - seen).max() < 1e-4  # the half of the layer is forgotten


async def test_logprobs_are_log_softmax_of_logits_over_temperature(rig, tiny_dir, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    rig.weights = rig.made.reseeded(rig.base, 3)
    await rig.update(40)
    model = AutoModelForCausalLM.from_pretrained(
        rig.made.save(tmp_path / "m", tiny_dir, rig.weights), dtype=torch.float32
    )
    prompt = [72, 101, 108, 108, 111]
    for temperature in (0.5, 1.0, 1.7):
        answers = await rig.engine.generate(f"T{temperature}", prompt, SamplingParams(16, temperature, seed=5), 4)
        assert len({a.token_ids.tobytes() for a in answers}) > 1  # n samples are not n copies
        for a in answers:
            ids = torch.tensor([prompt + a.token_ids.tolist()])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
            wanted = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1).numpy()
            assert np.abs(wanted - a.logprobs).max() < 2e-4
            if temperature == 1.0:
                scored = await rig.engine.score(prompt, a.token_ids.tolist(), 1.0)
                assert np.abs(wanted - scored).max() < 2e-4
    (first,) = await rig.engine.generate("g", prompt, GREEDY, 1)
    with torch.no_grad():
        greedy = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert first.token_ids.tolist()[:20] == greedy[0, len(prompt) :].tolist()[:20]


async def test_a_stop_string_stays_in_the_tokens_and_leaves_the_text(rig) -> None:
    rig.weights = rig.made.emitter(rig.base, ord("x"))
    await rig.update(41)
    (answer,) = await rig.engine.generate("s", [65], SamplingParams(24, temperature=0.0, stop=("xxx",)), 1)
    assert answer.token_ids.tolist() == [ord("x")] * 3 and answer.text == "" and answer.status is Status.FINISHED
    assert len(answer.logprobs) == 3 and answer.versions[-1].end == 3
    rig.weights = rig.made.emitter(rig.base, 258)  # the end-of-sequence token
    await rig.update(42)
    (answer,) = await rig.engine.generate("e", [65], GREEDY, 1)
    assert answer.token_ids.tolist() == [258] and answer.status is Status.FINISHED


async def test_what_does_not_fit_is_refused_in_words(rig) -> None:
    with pytest.raises(ConfigError, match="does not fit a context of 256"):
        await rig.engine.generate("long", [65] * 250, SamplingParams(10), 1)
    with pytest.raises(ConfigError, match="prompt of 0 tokens"):
        await rig.engine.generate("empty", [], SamplingParams(10), 1)
    with pytest.raises(ConfigError, match="temperature"):
        await rig.engine.score([65], [66], 0.5)


async def test_a_pause_holds_requests_and_ends_by_itself(rig) -> None:
    rig.weights = rig.made.emitter(rig.base, 50)
    await rig.update(50)
    token = await rig.engine.pause("a holder that dies", ttl_s=0.5)
    request = asyncio.create_task(rig.engine.generate("paused", [65], GREEDY, 1))
    await asyncio.sleep(0.3)
    assert not request.done() and rig.engine.gauges()["engine_paused"] == 1
    (answer,) = await asyncio.wait_for(request, 10)
    assert len(answer.token_ids) == 24 and "pause_expired" in rig.events
    assert await rig.engine.resume(token) is False


async def test_a_killed_engine_process_is_an_error_and_not_a_hang(rig) -> None:
    (core,) = [p for p in psutil.Process().children() if "EngineCore" in "".join(p.cmdline())]
    request = asyncio.create_task(rig.engine.generate("doomed", [65], SamplingParams(200), 1))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    os.kill(core.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="died"):
        await asyncio.wait_for(request, 10)
    with pytest.raises(EngineError):
        await asyncio.wait_for(rig.engine.generate("late", [65], GREEDY, 1), 10)
    with pytest.raises(EngineError):
        await asyncio.wait_for(rig.update(60), 30)
    assert time.monotonic() - started < 30


async def test_a_directory_without_a_model_is_refused_before_anything_starts(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        await VllmEngine(VllmSettings(str(tmp_path))).start()
