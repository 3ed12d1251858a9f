"""Proves, without a GPU (a file that both sides map stands for the bucket, see `cpu_ipc`): through vLLM's own packing,
unpacking and loading every version arrives as it was sent, its bucket opened once; damaged bytes are refused and sent
again; a learner that gives up or dies, and an engine that does not come, does not read or is on another GPU, are named
within the deadline; handles travel as plain data. That CUDA's own handles work is not proven here.

With the real vLLM on CPU: five versions during generation with every token's version exact, one of them refused and
sent again, and after a sending that broke half-way the log-probs of the weights that were sent last."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import mmap
import time

import numpy as np
import pytest
import torch

from actors.weight_sync import ThreadedSender, WeightSync
from learner.ipc_sender import IpcSender
from rollout.engine import SamplingParams
from rollout.errors import ConfigError, DeadlineError, EngineError, NoEngine, WeightError
from rollout.ipc_handle import ARGUMENTS, IpcHandle
from rollout.service import RolloutService
from rollout.versions import check_spans
from rollout.vllm_engine import VllmSettings, engine_arguments, vllm_engine
from rollout.vllm_ipc import IpcTrainer
from rollout.weight_checksum import checksum
from rollout.weight_turns import Turn, TurnTaker
from tests.rollout import cpu_ipc
from tests.rollout.fake_llm import FakeLlm
from tests.rollout.traffic import lived_through_an_update, traffic

BUCKET = 1000


# --- the handle -------------------------------------------------------------------------------------------------------

STORAGE = torch.storage.TypedStorage
BYTES = (torch.Tensor, torch.Size((64,)), (1,), 0, STORAGE, torch.uint8)
SHARED = (*BYTES, 0, b"\1m", 64, 512, False, b"c", 3, b"e", True)


def test_a_handle_is_plain_and_comes_back_as_torch_gave_it() -> None:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    assert tuple(inspect.signature(rebuild_cuda_tensor).parameters) == ARGUMENTS
    turn = Turn(7, 3, 12, 20, IpcHandle.of("GPU-5c1f", SHARED))
    back = Turn.from_json(turn.to_json())
    assert back == turn and back.bucket.gpu == "GPU-5c1f"
    wanted, got = dict(zip(ARGUMENTS, SHARED, strict=True)), dict(zip(ARGUMENTS, back.bucket.arguments(), strict=True))
    del wanted["storage_device"], got["storage_device"]  # the reader's own
    assert got == wanted


@pytest.mark.parametrize(("at", "value"), [(5, torch.float32), (3, 8), (2, (2,))])
def test_only_a_bucket_is_shared(at, value) -> None:
    with pytest.raises(WeightError, match="a bucket is uint8"):
        IpcHandle.of("g", (*SHARED[:at], value, *SHARED[at + 1 :]))


def service(engine) -> RolloutService:
    return RolloutService(engine, SamplingParams(8), group_size=1, max_in_flight=1)


# --- both ends, with vLLM's own packing and loading -------------------------------------------------------------------


class Model(torch.nn.Module):
    """Keeps what it is told to load, as vLLM's layers do until they are whole: without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, tensors) -> None:
        self.loaded.update(tensors)


class WorkerLlm(FakeLlm):
    """vLLM, of which the worker's transfer engine is the real one."""

    def __init__(self) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import PackedBufferImporter

        from rollout.vllm_summing import SummingIpc

        super().__init__()
        self.worker = worker = SummingIpc.__new__(SummingIpc)
        worker.model, worker.model_config, worker.device = Model(), None, torch.device("cpu")
        worker._packed_importer = PackedBufferImporter()

    def answer(self, what, args):
        return self.worker.call(what, args)

    async def init_weight_transfer_engine(self, request) -> None:
        self.worker.init_transfer_engine(self.worker.parse_init_info(request.init_info))

    async def collective_rpc(self, method, args=()):
        if method == "headrace_begin":
            self.worker.start_weight_update()
        return await super().collective_rpc(method, args)

    async def update_weights(self, request) -> None:
        self.log.append("update_weights")
        await asyncio.to_thread(self.worker.update_weights, request.update_info)

    async def finish_weight_update(self, version) -> None:
        self.log.append("finish_weight_update")
        self.worker.finish_weight_update()


class Tampering(IpcTrainer):
    """Does `alter(filling, bucket)` to a bucket that was filled and not yet read."""

    alter = staticmethod(lambda filling, bucket: None)

    def fill(self, tensors, bucket_bytes):
        with contextlib.closing(super().fill(tensors, bucket_bytes)) as fillings:
            for i, (count, handle) in enumerate(fillings):
                path = bytes.fromhex(handle.memory).decode()
                with open(path, "r+b") as file, mmap.mmap(file.fileno(), handle.nbytes) as bucket:
                    self.alter(i, bucket)
                yield count, handle


def flip(filling, bucket) -> None:
    if filling == 2:
        bucket[100] ^= 8


class Pair:
    """A sender and an engine whose vLLM is `WorkerLlm`."""

    def __init__(self, timeout_s: float = 10.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.make = lambda: {f"w{i}": torch.randn(10, 4 + i, generator=generator) for i in range(20)}
        self.weights = self.make()  # 160 to 920 bytes each
        self.trainer: IpcTrainer | None = None
        self.sender = IpcSender(self.source, bucket_bytes=BUCKET, timeout_s=timeout_s, trainer=self.open)
        self.engine = vllm_engine(VllmSettings("m", plane="ipc", timeout_s=timeout_s))
        self.engine._llm = self.llm = WorkerLlm()

    def source(self):
        yield from self.weights.items()

    def open(self) -> IpcTrainer:
        self.trainer = Tampering()
        return self.trainer

    async def form(self) -> None:
        rdv = self.sender.invite(["e0"])
        await asyncio.gather(asyncio.to_thread(self.sender.enter), self.engine.join(rdv["e0"]))

    async def deliver(self, version: int):
        manifest = self.sender.announce(version)
        sending = asyncio.to_thread(self.sender.send, manifest)
        return await asyncio.gather(sending, self.engine.stage(manifest), return_exceptions=True)

    def close(self) -> None:
        self.sender.close()
        self.engine._leave()


@pytest.fixture
def one_gpu(monkeypatch):
    from vllm.model_executor.model_loader import reload

    cpu_ipc.install(monkeypatch.setattr)
    monkeypatch.setattr(cpu_ipc, "opened", [])
    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(reload, "finalize_layerwise_reload", lambda model, config: None)


@pytest.fixture
async def pair(one_gpu):
    pair = Pair()
    await pair.form()
    yield pair
    pair.close()


async def test_every_version_arrives_through_a_bucket_that_is_opened_once(pair) -> None:
    for version in (1, 2, 3):
        pair.weights = pair.make()
        sent, receipt = await pair.deliver(version)
        assert receipt.root == sent.root and sent.nbytes == sum(t.nbytes for t in pair.weights.values()) > 10 * BUCKET
        await pair.engine.commit_weights(version, sent.root)
        loaded = pair.llm.worker.model.loaded
        assert {n: checksum(t) for n, t in loaded.items()} == {n: checksum(t) for n, t in pair.weights.items()}
        assert pair.engine.version == version and len(cpu_ipc.opened) == version == len(set(cpu_ipc.opened))
        assert pair.llm.worker._packed_importer._entry is None  # let go of at the commit
    updates = pair.llm.log.count("update_weights")
    assert updates >= 3 * 11 and pair.llm.log.count("pause_scheduler_async") == 3
    assert pair.llm.log[-1] == "resume_generation" and "abort" not in pair.llm.log


async def test_a_tensor_larger_than_the_bucket_gets_a_larger_one(pair) -> None:
    pair.weights["large"] = torch.ones(3 * BUCKET)
    sent, receipt = await pair.deliver(1)
    assert receipt.root == sent.root


async def test_the_bucket_is_not_filled_again_before_it_was_read(pair) -> None:
    """The reader takes its time, and what it reads at the end of it is still its own."""
    read = pair.llm.worker.update_weights

    def slowly(info) -> None:
        time.sleep(0.02)
        read(info)

    pair.llm.worker.update_weights = slowly
    sent, receipt = await pair.deliver(1)
    assert receipt.root == sent.root


async def test_a_flipped_bit_is_refused_and_sent_again_while_requests_stand(pair) -> None:
    pair.sender._trainer.alter = flip
    sent, receipt = await pair.deliver(1)
    assert receipt.root != sent.root
    with pytest.raises(WeightError, match="refused"):
        await pair.engine.commit_weights(1, sent.root)
    await pair.engine.discard_weights()
    with pytest.raises(EngineError, match="half loaded"):
        pair.engine._running()
    pair.sender._trainer.alter = lambda filling, bucket: None
    await pair.form()
    sent, receipt = await pair.deliver(1)
    await pair.engine.commit_weights(1, sent.root)
    assert pair.engine.version == 1 and not {"abort"} & set(pair.llm.log)


async def test_a_learner_that_gives_up_is_heard_at_once(pair) -> None:
    whole = pair.source

    def breaks():
        for i, item in enumerate(whole()):
            if i == 12:
                raise RuntimeError("a gather failed")
            yield item

    pair.sender.announce(1)
    pair.sender._layout.source = breaks
    sent, error = await pair.deliver(1)
    assert str(sent) == "a gather failed" and "gave up sending version 1" in str(error)
    assert not pair.sender.in_group
    pair.sender._layout.source = whole
    await pair.form()
    sent, receipt = await pair.deliver(1)
    assert receipt.root == sent.root


async def test_before_the_learner_begins_the_engine_goes_on_with_what_it_has(one_gpu) -> None:
    pair = Pair(timeout_s=0.3)
    await pair.form()
    with pytest.raises(DeadlineError, match=r"tensors 0\.\. of version 1 from the learner"):
        await pair.engine.stage(pair.sender.announce(1))
    assert pair.llm.log == ["gpu"] and pair.engine._running()
    pair.close()


async def test_a_learner_that_dies_is_an_error_at_once(pair) -> None:
    manifest = pair.sender.announce(1)
    staging = asyncio.create_task(pair.engine.stage(manifest))
    await asyncio.sleep(0.05)
    pair.engine._turns._store._connection.shutdown(2)  # what the engine sees of a killed process
    with pytest.raises(WeightError, match="the learner is gone"):
        await asyncio.wait_for(staging, 5)


async def test_an_engine_that_does_not_read_is_named_within_the_deadline(one_gpu) -> None:
    pair = Pair(timeout_s=0.3)
    await pair.form()
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="e0 to read turn 1 of version 1"):
        await asyncio.to_thread(pair.sender.send, pair.sender.announce(1))
    assert time.monotonic() - started < 5 and not pair.sender.in_group
    pair.close()


async def test_an_engine_that_does_not_come_is_named(one_gpu) -> None:
    pair = Pair(timeout_s=0.2)
    pair.sender.invite(["e0"])
    with pytest.raises(DeadlineError, match="e0 to enter weight group epoch 1"):
        await asyncio.to_thread(pair.sender.enter)
    pair.close()


async def test_an_engine_on_another_gpu_is_refused(one_gpu) -> None:
    pair = Pair()
    TurnTaker(pair.sender.invite(["e0"])["e0"], "GPU-other")
    with pytest.raises(WeightError, match="e0 is on GPU GPU-other, the learner on GPU-stand-in"):
        await asyncio.to_thread(pair.sender.enter)
    pair.close()


def test_what_ipc_cannot_do_is_refused_in_words(one_gpu, tmp_path) -> None:
    with pytest.raises(WeightError, match="ipc has one engine, here are e0, e1"):
        Pair().sender.invite(["e0", "e1"])
    (tmp_path / "config.json").write_text("{}")
    for settings, reason in (({"tensor_parallel": 2}, "ipc has one receiver"), ({"adapter_rank": 4}, "by ipc")):
        with pytest.raises(ConfigError, match=reason):
            asyncio.run(vllm_engine(VllmSettings(str(tmp_path), plane="ipc", **settings)).start())


async def test_a_damaged_version_costs_the_engine_and_the_next_one_is_brought_it(pair) -> None:
    """`WeightSync` over this plane: an epoch per membership, one version after another in it, a refusal, a newcomer."""
    events: list[str] = []
    sync = WeightSync(ThreadedSender(pair.sender), lambda kind, **f: events.append(kind), timeout_s=10)
    sync.admit("e0", service(pair.engine))
    assert [(await sync.push(version)).committed["e0"].version for version in (1, 2)] == [1, 2]
    pair.sender._trainer.alter = flip
    with pytest.raises(NoEngine, match="e0: could not commit version 3: version 3 was received as"):
        await sync.push(3)
    assert events[-2:] == ["weights_refused", "engine_quarantined"] and pair.engine.version == 2
    pair.sender._trainer.alter = lambda filling, bucket: None
    other = Pair()
    report = await sync.bring("e0", service(other.engine), 3)
    assert report.committed["e0"].version == other.engine.version == 3
    other.close()


async def test_a_dead_engine_does_not_hold_the_learner_beyond_the_deadline(one_gpu) -> None:
    pair = Pair(timeout_s=0.3)
    events: list[str] = []
    sync = WeightSync(ThreadedSender(pair.sender), lambda kind, **f: events.append(kind), timeout_s=0.3, grace_s=0.3)
    sync.admit("e0", service(pair.engine))
    await sync.push(1)
    pair.llm.update_weights = lambda request: asyncio.sleep(3600)
    started = time.monotonic()
    with pytest.raises(NoEngine, match="e0: silent while version 2 was staged"):
        await sync.push(2)
    assert time.monotonic() - started < 10 and "engine_quarantined" in events
    pair.close()


async def test_an_engine_that_cannot_load_is_named_at_once_and_replaced(pair) -> None:
    events: list[str] = []
    sync = WeightSync(ThreadedSender(pair.sender), lambda kind, **f: events.append(kind), timeout_s=10)
    sync.admit("e0", service(pair.engine))

    def fails(info) -> None:
        raise KeyError("model.layers.7")

    pair.llm.worker.update_weights = fails
    started = time.monotonic()
    with pytest.raises(NoEngine, match=r"e0: .*the loading of version 1 failed \(KeyError: 'model.layers.7'\)"):
        await sync.push(1)
    assert time.monotonic() - started < 8 and events == ["engine_admitted", "engine_quarantined"]


# --- the real vLLM ----------------------------------------------------------------------------------------------------

PROMPT, TOKENS = [72, 101, 108, 108, 111], [32, 119, 111, 114, 108, 100]


@pytest.mark.timeout(300)
async def test_the_real_vllm_with_a_file_for_a_bucket(emitter_dir, made, monkeypatch) -> None:
    cpu_ipc.install(monkeypatch.setattr)
    ours = engine_arguments
    calls = {"worker_extension_cls": f"{cpu_ipc.__name__}.{cpu_ipc.CpuCalls.__name__}"}
    monkeypatch.setattr("rollout.vllm_engine.engine_arguments", lambda settings: ours(settings) | calls)
    small = {"max_model_len": 256, "kv_cache_bytes": 32 << 20, "timeout_s": 30.0}
    engine = vllm_engine(VllmSettings(str(emitter_dir), "float32", plane="ipc", **small))
    await engine.start()
    base = made.load(emitter_dir)
    weights = dict(base)
    sender = IpcSender(lambda: iter(weights.items()), bucket_bytes=50_000, timeout_s=30, trainer=Tampering)

    async def deliver(version: int):
        if not sender.in_group:
            rdv = sender.invite(["e0"])
            await asyncio.gather(asyncio.to_thread(sender.enter), engine.join(rdv["e0"]))
        manifest = sender.announce(version)
        sending = asyncio.to_thread(sender.send, manifest)
        return await asyncio.gather(sending, engine.stage(manifest), return_exceptions=True)

    async with traffic(engine, streams=2) as answers:
        for version in range(1, 6):
            weights = made.emitter(base, version)
            if version == 3:
                sender._trainer.alter = flip
                sent, receipt = await deliver(version)
                with pytest.raises(WeightError, match="refused"):
                    await engine.commit_weights(version, sent.root)
                sender._trainer.alter = lambda filling, bucket: None
            sent, receipt = await deliver(version)
            assert receipt.root == sent.root
            assert (await engine.commit_weights(version, sent.root)).version == version
    for answer in answers:
        check_spans(answer.versions, 40)
        made_by = [s.version for s in answer.versions for _ in range(s.start, s.end)]
        assert made_by == answer.token_ids.tolist()  # the token IS the version of the weights; none was lost or cut
    assert lived_through_an_update(answers) >= 5, "the test proved nothing"

    names = list(base)
    stop = next(i for i, n in enumerate(names) if n.endswith("1.self_attn.q_proj.weight"))  # of a layer with k and v

    def breaks_off(filling, bucket) -> None:
        if filling:
            raise RuntimeError("the learner's GPU is out of memory")

    other = made.reseeded(base, 1)
    weights = {n: other[n] for n in [*names[stop:], *names[:stop]]}
    sender._layout._known = None  # in another order: the sending that breaks off leaves layers half full
    sender.bucket_bytes, sender._trainer.alter = 20_000, breaks_off
    sent, error = await deliver(6)
    assert isinstance(sent, RuntimeError) and "gave up" in str(error)
    sender._trainer.alter = lambda filling, bucket: None
    other = made.reseeded(base, 2)
    weights = {n: other[n] for n in weights}
    sent, receipt = await deliver(7)
    await engine.commit_weights(7, sent.root)
    seen = await engine.score(PROMPT, TOKENS, 1.0)
    assert np.abs(seen - made.log_probs(emitter_dir, PROMPT, TOKENS, weights)).max() < 1e-4
    sender.close()
    await engine.close()
