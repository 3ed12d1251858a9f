"""Proves, over real gloo: a version arrives whole and is proven before it can be committed; tampering with any byte on
the way, at any bucket size, is refused; what the learner must not send is refused before it is served; whoever is
missing is named within the deadline; the sender owns two buckets and sees each tensor once."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from benchmarks.light_engine import HEAD, LightEngine, always, bigram
from learner.weight_sender import WeightSender, gather_along
from rollout.errors import DeadlineError, WeightError
from rollout.weight_stream import as_bytes

V = 48  # 48 * 48 * 4 bytes: 9 KB
BUCKET = 2000  # not a divisor of anything


class Pair:
    """A sender and engines in one process; `weights` is what the learner has."""

    def __init__(self, tmp_path, n: int = 1, timeout_s: float = 10.0, **engine) -> None:
        self.weights = bigram(V)
        self.sender = WeightSender(lambda: iter(self.weights.items()), bucket_bytes=BUCKET, timeout_s=timeout_s)
        self.engines = {
            f"e{i}": LightEngine(bigram(V), bucket_bytes=BUCKET, timeout_s=timeout_s, spool_dir=tmp_path, **engine)
            for i in range(n)
        }

    async def form(self) -> None:
        rdv = self.sender.invite(list(self.engines))
        joins = [e.join(rdv[n]) for n, e in self.engines.items()]
        await asyncio.gather(asyncio.to_thread(self.sender.enter), *joins)

    async def deliver(self, version: int):
        manifest = self.sender.announce(version)
        stages = [e.stage(manifest) for e in self.engines.values()]
        return await asyncio.gather(asyncio.to_thread(self.sender.send, manifest), *stages, return_exceptions=True)

    async def close(self) -> None:
        self.sender.close()
        for e in self.engines.values():
            await e.close()


@pytest.fixture
async def pair(tmp_path):
    pair = Pair(tmp_path)
    await pair.form()
    yield pair
    await pair.close()


async def test_three_engines_serve_what_was_sent(tmp_path) -> None:
    pair = Pair(tmp_path, 3)
    await pair.form()
    for version in (1, 2, 3):
        pair.weights = bigram(V, seed=version)
        sent, *receipts = await pair.deliver(version)
        assert {r.root for r in receipts} == {sent.root} and sent.nbytes == V * V * 4
        for e in pair.engines.values():
            await e.commit_weights(version, sent.root)
            assert torch.equal(e._weights[HEAD], pair.weights[HEAD]) and e.version == version
    await pair.close()


class Tampering:
    """Stands between the sender and its group; `alter(index, buffer)` sees each broadcast (0 is the prologue)."""

    def __init__(self, group, alter) -> None:
        self._group, self._alter, self._index = group, alter, 0
        self.rendezvous = group.rendezvous
        self.start_clock, self.wait, self.close = group.start_clock, group.wait, group.close

    @property
    def broken(self) -> bool:
        return self._group.broken

    def broadcast(self, buffer):
        index, self._index = self._index, self._index + 1
        return self._group.broadcast(self._alter(index, buffer))


@pytest.mark.parametrize("index", [1, 3, 5, 6])  # buckets; 6 is the trailer
async def test_a_flipped_bit_is_refused_and_the_old_version_served(pair, index) -> None:
    def flip(i, buffer):
        if i == index:
            buffer = buffer.clone()
            buffer[len(buffer) // 2] ^= 1
        return buffer

    pair.sender._group = Tampering(pair.sender._group, flip)
    sent, error = await pair.deliver(1)
    assert isinstance(error, WeightError) and f"{HEAD} of version 1" in str(error)
    with pytest.raises(WeightError, match="nothing is staged"):
        await pair.engines["e0"].commit_weights(1, sent.root)
    assert pair.engines["e0"].version == 0
    pair.sender._group = pair.sender._group._group
    sent, receipt = await pair.deliver(1)  # the group is still good: send again
    assert receipt.root == sent.root


async def test_a_buffer_reused_too_early_is_refused(pair) -> None:
    started = []

    def scribble(i, buffer):
        if i == 2:
            started.append(buffer.clone())
            buffer.fill_(7)
        return buffer

    pair.sender._group = Tampering(pair.sender._group, scribble)
    _, error = await pair.deliver(1)
    assert started and isinstance(error, WeightError)


@pytest.mark.parametrize(("what", "word"), [(1, "epoch"), (2, "version"), (3, "layout")])
async def test_a_stale_or_foreign_prologue_is_refused_by_name(tmp_path, what, word) -> None:
    pair = Pair(tmp_path, timeout_s=2)
    await pair.form()

    def age(i, buffer):
        if i == 0:
            buffer = buffer.clone()
            buffer[what] -= 1
        return buffer

    pair.sender._group = Tampering(pair.sender._group, age)
    _, error = await pair.deliver(1)
    assert isinstance(error, WeightError) and f"stream's {word}" in str(error)
    pair.sender._group = pair.sender._group._group
    sent, receipt = await pair.deliver(2)  # the refused stream passed by: the group is still of use
    assert receipt.root == sent.root
    await pair.close()


async def test_a_truncated_bucket_is_refused_within_the_deadline(tmp_path) -> None:
    pair = Pair(tmp_path, timeout_s=2)
    await pair.form()
    pair.sender._group = Tampering(pair.sender._group, lambda i, b: b[:-8] if i == 2 else b)
    started = time.monotonic()
    _, error = await pair.deliver(1)
    assert isinstance(error, (WeightError, DeadlineError)) and time.monotonic() - started < 8
    assert pair.engines["e0"].version == 0
    await pair.close()


SOURCES = {
    "missing": lambda w: {HEAD: w[HEAD]},
    "reordered": lambda w: dict(reversed(w.items())),
    "wrong dtype": lambda w: {**w, HEAD: w[HEAD].bfloat16()},
    "wrong shape": lambda w: {**w, HEAD: w[HEAD][:-1]},
    "unannounced": lambda w: {**w, "extra": torch.zeros(1)},
}


@pytest.mark.parametrize("fault", SOURCES)
async def test_a_learner_that_sends_something_else_is_stopped_by_name(tmp_path, fault) -> None:
    pair = Pair(tmp_path, timeout_s=3)
    pair.weights["norm.weight"] = torch.ones(4)
    await pair.form()
    pair.sender.announce(0)
    pair.weights = SOURCES[fault](pair.weights)
    sent, received = await pair.deliver(1)
    assert isinstance(sent, WeightError) and "announced" in str(sent)
    assert isinstance(received, WeightError) and "gave up sending version 1" in str(received)
    assert pair.sender.in_group and pair.engines["e0"].version == 0
    await pair.close()


async def test_a_source_that_raises_lets_nobody_wait(pair) -> None:
    def broken():
        yield from bigram(V).items()
        raise OSError("gather failed")

    pair.sender.announce(1)
    pair.sender._layout.source = broken
    started = time.monotonic()
    sent, received = await pair.deliver(1)
    assert isinstance(sent, OSError) and isinstance(received, WeightError) and time.monotonic() - started < 5


async def test_the_missing_engine_is_named(tmp_path) -> None:
    pair = Pair(tmp_path, 2, timeout_s=1)
    rdv = pair.sender.invite(["e0", "e1"])
    entered, joined = await asyncio.gather(
        asyncio.to_thread(pair.sender.enter), pair.engines["e0"].join(rdv["e0"]), return_exceptions=True
    )
    assert isinstance(entered, DeadlineError) and entered.awaited.startswith("e1 to enter")
    assert isinstance(joined, DeadlineError)
    await pair.close()


async def test_an_engine_that_leaves_mid_way_breaks_the_epoch_not_the_next(tmp_path) -> None:
    pair = Pair(tmp_path, 2, timeout_s=3)
    await pair.form()
    gone = pair.engines.pop("e1")
    await gone.close()
    started = time.monotonic()
    sent, received = await pair.deliver(1)
    assert isinstance(sent, WeightError) and isinstance(received, WeightError) and not pair.sender.in_group
    assert time.monotonic() - started < 2, "everybody knows at once, not at the deadline"
    await pair.form()
    sent, received = await pair.deliver(1)
    await pair.engines["e0"].commit_weights(1, sent.root)
    assert pair.engines["e0"].version == 1
    await pair.close()


async def test_each_tensor_is_seen_once_and_may_die_at_once(pair) -> None:
    seen = []

    def gathered():
        for name, tensor in bigram(V, seed=5).items():
            alive = tensor.clone()
            seen.append(name)
            yield name, alive
            alive.fill_(float("nan"))  # ZeRO-3 partitions it again

    pair.sender.announce(1)
    pair.sender._layout.source = gathered
    sent, receipt = await pair.deliver(1)
    assert seen == [HEAD] and sent.root == receipt.root
    await pair.engines["e0"].commit_weights(1, sent.root)
    assert torch.equal(pair.engines["e0"]._weights[HEAD], bigram(V, seed=5)[HEAD])


async def test_a_commit_refuses_another_digest_than_the_learners(pair) -> None:
    await pair.deliver(1)
    with pytest.raises(WeightError, match="the learner sent deadbeef"):
        await pair.engines["e0"].commit_weights(1, "deadbeef")
    assert pair.engines["e0"].version == 0


async def test_tokens_carry_the_version_that_made_them(tmp_path) -> None:
    from rollout.engine import SamplingParams

    pair = Pair(tmp_path, step_s=0.001)
    pair.weights = always(0, V)
    pair.engines["e0"]._weights = {n: t.clone() for n, t in always(0, V).items()}
    await pair.form()
    task = asyncio.create_task(pair.engines["e0"].generate("r", [1], SamplingParams(400, temperature=0.0), 2))
    for version in range(1, 6):
        pair.weights = always(version, V)
        sent, _ = await pair.deliver(version)
        await pair.engines["e0"].commit_weights(version, sent.root)
    for answer in await task:
        made_by = [s.version for s in answer.versions for _ in range(s.start, s.end)]
        assert made_by == answer.token_ids.tolist() and len(answer.versions) > 3
    await pair.close()


def test_other_ranks_walk_along() -> None:
    seen = []
    gather_along(lambda: ((n, seen.append(n) or t) for n, t in bigram(V).items()))
    assert seen == [HEAD]


def test_nothing_to_send_to_is_an_error() -> None:
    sender = WeightSender(lambda: bigram(V).items())
    with pytest.raises(WeightError, match="no engine is left"):
        sender.invite([])
    with pytest.raises(WeightError, match="invite engines first"):
        sender.send(sender.announce(1))
    assert as_bytes(torch.zeros(2)).numel() == 8
