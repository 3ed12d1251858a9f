"""The smallest complete Engine: a bigram model in torch behind the same weight plane as vLLM's. For tests and benches.

The model is a matrix and, if it has one, a low-rank adapter: the logits after token t are

    head.weight[t] + adapter.up.weight[t] @ adapter.down.weight

Everything else is real: the inbox, the spool, the digests, the swap between two decoding steps, the version of every
token. Start-up takes milliseconds, so that tests can have twenty of them, and kill them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from rollout.engine import CommitReport, Completion, Rendezvous, SamplingParams
from rollout.errors import ConfigError, WeightError
from rollout.types import Float32, Int32, Status
from rollout.versions import VersionSpan, WeightManifest
from rollout.weight_inbox import Receipt, WeightInbox, until
from rollout.weight_stream import views

HEAD, UP, DOWN = "head.weight", "adapter.up.weight", "adapter.down.weight"
_POLL_S = 0.005


def bigram(vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of a light model: {"head.weight": float32[V, V]}."""
    return {HEAD: torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))}


def adapter(token: int, vocab: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """An adapter that outweighs `always`: with it, every greedy token is `token`."""
    up, down = torch.zeros(vocab, rank), torch.zeros(rank, vocab)
    up[:, 0] = 1.0
    down[0, token % vocab] = 50.0
    return {UP: up, DOWN: down}


def logits(weights: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """float32[n, V] after each of `tokens` int64[n]."""
    plain = weights[HEAD].float()[tokens]
    return plain if UP not in weights else plain + weights[UP].float()[tokens] @ weights[DOWN].float()


def always(token: int, vocab: int) -> dict[str, torch.Tensor]:
    """Weights under which every greedy token is `token`: an engine that emits the version it serves."""
    head = torch.arange(vocab, dtype=torch.float32).unsqueeze(1).repeat(1, vocab)  # no two rows have equal bytes
    head[:, token % vocab] += 20.0
    return {HEAD: head}


class LightEngine:
    """`rollout.engine.Engine` on a bigram model.

    `takes` are the names an update must bring, all by default; with an adapter's names alone, the base stays as it is.
    `on_load` may alter weights while they are loaded: a bug that no digest of received bytes sees.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        *,
        version: int = 0,
        bucket_bytes: int = 1 << 16,
        timeout_s: float = 10.0,
        spool_dir: Path | str | None = None,
        step_s: float = 0.0,
        store_url: str = "",
        takes: Sequence[str] | None = None,
        on_load: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._weights = {n: t.float().clone() for n, t in weights.items()}
        self._version, self._timeout_s, self._step_s, self._store_url = version, timeout_s, step_s, store_url
        self._takes = set(takes if takes is not None else self._weights)
        self._on_load = on_load or (lambda name, tensor: tensor)
        self.inbox = WeightInbox(bucket_bytes, spool_dir)
        self._counts = {"requests": 0, "tokens": 0, "commits": 0}

    async def start(self) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        self.inbox.close()

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int] | Int32, sampling: SamplingParams, n: int
    ) -> list[Completion]:
        if len(prompt_ids) == 0:
            raise ConfigError(f"request {request_id}: the prompt is empty")
        seed = sampling.seed if sampling.seed is not None else hash(request_id) & 0xFFFFFFFF
        answers = [self._answer(int(prompt_ids[-1]), sampling, seed + i) for i in range(n)]
        return list(await asyncio.gather(*answers))

    async def _answer(self, token: int, sampling: SamplingParams, seed: int) -> Completion:
        generator = torch.Generator().manual_seed(seed)
        tokens, logprobs, versions = [], [], []
        for _ in range(sampling.max_tokens):
            row = torch.log_softmax(
                logits(self._weights, torch.tensor([token]))[0] / (sampling.temperature or 1.0), dim=-1
            )
            token = int(row.argmax() if sampling.greedy else torch.multinomial(row.exp(), 1, generator=generator))
            tokens.append(token)
            logprobs.append(float(row[token]))
            versions.append(self._version)
            await asyncio.sleep(self._step_s)  # a commit happens between two steps, never inside one
        self._counts["requests"] += 1
        self._counts["tokens"] += len(tokens)
        text = " ".join(map(str, tokens))
        ids, values = np.array(tokens, np.int32), np.array(logprobs, np.float32)
        return Completion(ids, values, spans_of(versions), Status.TRUNCATED, text)

    async def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float) -> Float32:
        return score(self._weights, prompt_ids, token_ids, temperature)

    async def join(self, rendezvous: Rendezvous) -> None:
        if self._store_url:  # nothing to meet for: versions are pulled
            return
        self.inbox.join(rendezvous)
        await self._until("joined", rendezvous.timeout_s)

    async def stage_weights(self, manifest: WeightManifest) -> float:
        return (await self.stage(manifest)).seconds

    async def stage(self, manifest: WeightManifest) -> Receipt:
        if self._store_url:
            self.inbox.fetch(self._store_url, manifest, self._timeout_s)
        else:
            self.inbox.stage(manifest)
        return await self._until("staged", self._timeout_s)

    async def discard_weights(self) -> None:
        self.inbox.discard()

    async def commit_weights(self, version: int, digest: str = "") -> CommitReport:
        started = time.monotonic()
        staged = self.inbox.take(version)
        if digest and staged.root != digest:
            self.inbox.discard()
            raise WeightError(f"version {version} was staged as {staged.root}, the learner sent {digest}; refused")
        fresh = {n: self._on_load(n, t).float().clone() for n, t in views(staged.manifest, staged.bytes())}
        if fresh.keys() != self._takes:
            raise WeightError(f"version {version} brings {sorted(fresh)}, the engine takes {sorted(self._takes)}")
        self._weights, self._version = {**self._weights, **fresh}, version
        self.inbox.committed(staged)
        self._counts["commits"] += 1
        seconds = time.monotonic() - started
        return CommitReport(version, seconds, seconds)

    async def _until(self, state: str, timeout_s: float) -> Receipt:
        return await until(state, timeout_s, self._status, _POLL_S)

    async def _status(self) -> Receipt:
        return self.inbox.status()

    @property
    def version(self) -> int:
        return self._version

    def gauges(self) -> dict[str, float]:
        return {"engine_version": float(self._version), **{f"engine_{k}": float(v) for k, v in self._counts.items()}}


def score(
    weights: Mapping[str, torch.Tensor], prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float
) -> Float32:
    """Log-probs float32[L] of a bigram model; what a learner of the same model computes for its canary."""
    previous = torch.tensor([int(prompt_ids[-1]), *map(int, token_ids[:-1])])
    rows = torch.log_softmax(logits(weights, previous) / temperature, dim=-1)
    picked = rows.gather(1, torch.tensor([int(t) for t in token_ids]).unsqueeze(1)).squeeze(1)
    return picked.numpy().astype(np.float32)


def spans_of(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """[3, 3, 4] -> (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))."""
    spans: list[VersionSpan] = []
    for i, v in enumerate(versions):
        if spans and spans[-1].version == v:
            spans[-1] = VersionSpan(v, spans[-1].start, i + 1)
        else:
            spans.append(VersionSpan(v, i, i + 1))
    return tuple(spans)
