"""What does a weight update cost? Ours against a plain gloo broadcast and vLLM's bare reload, interleaved in one run.

    headrace bench weights --model models/smollm2-135m [--json FILE] [--repeats 5] [--no-engine]

    transfer   raw    one buffer broadcast over and over: what the path can do at all
               plain  one broadcast per tensor into fresh memory, no digests: what most systems do
               ours   buckets into the spool, digests on both sides
               unproven   the same without digests: the difference is what attestation costs
    load       bare   vLLM's layerwise reload from memory, generation standing still
               ours   stall of a commit during generation: pause, reload from the spool, mend, resume
    delta      bytes of a version against the one before, after a step of the size of `--lr`; time to write and to fetch
    memory     how far the resident set of either side rises during a transfer, beyond what it was before

Sender and receiver have a core each (0 and 1). Medians are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.light_process import Remote, serve
from learner import weight_sender
from learner.weight_sender import WeightSender
from rollout.engine import Rendezvous
from rollout.errors import WeightError
from rollout.versions import WeightManifest
from rollout.vllm_weights import WeightCalls
from rollout.weight_group import GlooGroup
from rollout.weight_inbox import manifest_from_plain, manifest_to_plain, receive
from rollout.weight_spool import Spool
from rollout.weight_store import WeightStore
from rollout.weight_stream import DigestTrail, as_bytes, buckets

BUCKET = 8 << 20
Weights = dict[str, torch.Tensor]


def load(model: Path) -> Weights:
    from safetensors.torch import load_file

    found: Weights = {}
    for path in sorted(model.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def rise(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and by how many bytes the resident set rose at its highest while it ran."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = work()
    return result, (_status("VmHWM") - before) * 1024


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise KeyError(key)


# --- transfer ---------------------------------------------------------------------------------------------------------


def _receiver(connection: Connection, spool_dir: str) -> None:
    """The engine's side of the transfer benchmark, pinned to core 1."""
    os.sched_setaffinity(0, {min(1, (os.cpu_count() or 1) - 1)})
    torch.set_num_threads(1)
    spool, groups = Spool(spool_dir), {}

    def run(op: str, a: dict[str, Any]) -> Any:
        if op == "enter":
            groups["now"] = GlooGroup.enter(Rendezvous(**a))
            return None
        group: GlooGroup = groups["now"]
        group.start_clock()
        manifest = manifest_from_plain(a)
        started = time.perf_counter()
        if op == "ours":
            staged, risen = rise(lambda: receive(group, manifest, spool, BUCKET))
            spool.promote(staged)
            return {"seconds": time.perf_counter() - started, "rise": risen}
        if op == "unproven":
            DigestTrail.update, update = lambda self, data: None, DigestTrail.update  # type: ignore[method-assign]
            try:
                receive(group, manifest, spool, BUCKET)
            except (WeightError, ValueError):
                pass  # nothing was digested, so nothing fits
            finally:
                DigestTrail.update = update  # type: ignore[method-assign]
        elif op == "plain":
            fresh = []
            for t in manifest.tensors:
                fresh.append(torch.empty(t.nbytes, dtype=torch.uint8))
                group.wait(group.broadcast(fresh[-1]))
        else:
            buffer = torch.empty(BUCKET, dtype=torch.uint8)
            for b in buckets([t.nbytes for t in manifest.tensors], BUCKET):
                group.wait(group.broadcast(buffer[: b.end - b.start]))
        return {"seconds": time.perf_counter() - started}

    async def handle(op: str, a: dict[str, Any]) -> Any:
        return await asyncio.to_thread(run, op, a)

    asyncio.run(serve(connection, handle))


async def transfer(weights: Weights, repeats: int, scratch: str) -> dict[str, float]:
    """Seconds of each way, medians over interleaved repeats; the first round only warms up."""
    os.sched_setaffinity(0, {0})
    sender = WeightSender(lambda: weights.items(), bucket_bytes=BUCKET)
    remote = Remote(_receiver, scratch)
    rendezvous = sender.invite(["receiver"])["receiver"]
    await asyncio.gather(
        remote.call("enter", {f: getattr(rendezvous, f) for f in rendezvous.__dataclass_fields__}),
        asyncio.to_thread(sender.enter),
    )
    manifest = sender.announce(1)
    group = sender._group
    assert group is not None
    ways: dict[str, Callable[[], Any]] = {
        "raw": lambda: _send_raw(group, manifest),
        "plain": lambda: _send_plain(group, weights),
        "unproven": lambda: _send_unproven(sender, manifest),
        "ours": lambda: rise(lambda: sender.send(manifest)),
    }
    seconds: dict[str, list[float]] = {w: [] for w in ways}
    rises: dict[str, list[float]] = {"sender": [], "receiver": []}
    for k in range(repeats + 1):
        for way, send in ways.items():
            started = time.perf_counter()
            got, sent = await asyncio.gather(remote.call(way, manifest_to_plain(manifest)), asyncio.to_thread(send))
            if k and way == "ours":
                rises["sender"].append(sent[1])
                rises["receiver"].append(got["rise"])
            if k:
                seconds[way].append(time.perf_counter() - started)
    await remote.close()
    sender.close()
    found = {f"transfer/{w}_s": statistics.median(s) for w, s in seconds.items()}
    found |= {f"memory/{w}_mb": statistics.median(r) / 1e6 for w, r in rises.items()}
    found["transfer/gb"] = manifest.nbytes / 1e9
    found["transfer/share_of_path"] = found["transfer/raw_s"] / found["transfer/ours_s"]
    found["attest/seconds"] = max(found["transfer/ours_s"] - found["transfer/unproven_s"], 0.0)
    return found


def _send_raw(group: GlooGroup, manifest: WeightManifest) -> None:
    buffer = torch.empty(BUCKET, dtype=torch.uint8)
    group.start_clock()
    for b in buckets([t.nbytes for t in manifest.tensors], BUCKET):
        group.wait(group.broadcast(buffer[: b.end - b.start]))


class _NoProof:
    """A digest of nothing at no cost."""

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 32


def _send_unproven(sender: WeightSender, manifest: WeightManifest) -> None:
    real = weight_sender.xxhash.xxh3_128
    weight_sender.xxhash.xxh3_128 = _NoProof
    try:
        sender.send(manifest)
    finally:
        weight_sender.xxhash.xxh3_128 = real


def _send_plain(group: GlooGroup, weights: Weights) -> None:
    group.start_clock()
    for tensor in weights.values():
        group.wait(group.broadcast(as_bytes(tensor)))


# --- load -------------------------------------------------------------------------------------------------------------


class BareCalls(WeightCalls):
    """The worker's calls, and vLLM's reload as it is: from memory, without spool, mend or version."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def headrace_bare_load(self) -> float:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        from rollout.weight_stream import views

        staged = self.weight_transfer_engine.inbox.spool.serving
        tensors = [(n, t.clone()) for n, t in views(staged.manifest, staged.bytes())]
        model = self.model_runner.get_model()
        started = time.perf_counter()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(iter(tensors))
            finalize_layerwise_reload(model, self.model_config)
        return time.perf_counter() - started


async def bare_load(engine: Any) -> float:
    token = await engine.pause("bench", ttl_s=60)
    (seconds,) = await engine._llm.collective_rpc("headrace_bare_load")
    await engine.resume(token)
    return float(seconds)


async def stall(model: Path, weights: Weights, repeats: int, scratch: str) -> dict[str, float]:
    """Bare reload and our commit, taking turns, while 16 requests are always in flight."""
    from rollout import vllm_weights
    from rollout.engine import SamplingParams
    from rollout.vllm_engine import VllmEngine, VllmSettings

    vllm_weights.WORKER_EXTENSION = "benchmarks.weights.BareCalls"
    started = time.perf_counter()
    engine = VllmEngine(VllmSettings(str(model), max_model_len=256, cores=(0, 1), spool_dir=scratch))
    await engine.start()
    found = {"engine/start_s": time.perf_counter() - started}
    sender = WeightSender(lambda: weights.items(), bucket_bytes=BUCKET)
    rdv = sender.invite(["e0"])
    await asyncio.gather(asyncio.to_thread(sender.enter), engine.join(rdv["e0"]))
    done, running = [0], [True]

    async def traffic(i: int) -> None:
        while running[0]:
            await engine.generate(f"{i}.{done[0]}", [100 + i] * 20, SamplingParams(32), 4)
            done[0] += 1

    tasks = [asyncio.create_task(traffic(i)) for i in range(4)]
    bare, ours, inside, stage = [], [], [], []
    for k in range(repeats + 1):
        manifest = sender.announce(k + 1)
        at = time.perf_counter()
        sent, _ = await asyncio.gather(asyncio.to_thread(sender.send, manifest), engine.stage_weights(manifest))
        staged = time.perf_counter() - at
        if k % 2:  # whoever loads second finds warmer caches: take turns
            seconds = await bare_load(engine)
        report = await engine.commit_weights(k + 1, sent.root)
        if not k % 2:
            seconds = await bare_load(engine)
        if k:
            bare.append(seconds)
            ours.append(report.stall_s)
            inside.append(report.load_s)
            stage.append(staged)
    running[0] = False
    await asyncio.gather(*tasks)
    sender.close()
    await engine.close()
    found |= {"load/bare_s": statistics.median(bare), "load/stall_s": statistics.median(ours)}
    found["load/inside_s"] = statistics.median(inside)
    found |= {"load/stage_beside_decoding_s": statistics.median(stage), "engine/groups": float(done[0])}
    found["load/stall_ratio"] = found["load/stall_s"] / found["load/bare_s"]
    return found


# --- delta ------------------------------------------------------------------------------------------------------------


def delta(weights: Weights, steps: int, lr: float, scratch: str) -> dict[str, float]:
    """Adam-sized steps (every weight moves by lr) on float32 masters; the served type is what the model has."""
    g = torch.Generator().manual_seed(0)
    masters = {n: t.float() for n, t in weights.items()}
    served = {n: t.dtype for n, t in weights.items()}

    def serving() -> list[tuple[str, torch.Tensor]]:
        return [(n, t.to(served[n])) for n, t in masters.items()]

    store, spool = WeightStore(f"{scratch}/store", anchor_every=steps + 2, scratch=scratch), Spool(scratch)
    store.publish(0, serving())
    spool.promote(store.fetch(0, spool))
    sizes, writes, fetches = [], [], []
    for version in range(1, steps + 1):
        for t in masters.values():
            t.add_(torch.empty_like(t).uniform_(-1, 1, generator=g).sign_(), alpha=lr)
        at = time.perf_counter()
        published = store.publish(version, serving())
        writes.append(time.perf_counter() - at)
        at = time.perf_counter()
        spool.promote(store.fetch(version, spool))
        fetches.append(time.perf_counter() - at)
        sizes.append(published.nbytes)
    assert spool.serving is not None
    exact = torch.equal(spool.serving.bytes(), torch.cat([as_bytes(t) for _, t in serving()]))
    return {
        "delta/share_of_full": max(sizes) / spool.serving.manifest.nbytes,
        "delta/write_s": statistics.median(writes),
        "delta/fetch_s": statistics.median(fetches),
        "delta/steps": float(steps),
        "delta/bit_exact": float(exact),
    }


# --- the table --------------------------------------------------------------------------------------------------------


def verdicts(found: dict[str, float]) -> list[tuple[str, float, str, bool]]:
    """(what, seen, required, holds) of the requirements that this run measured."""
    rows = [("transfer / what the path can do", found["transfer/share_of_path"], ">= 0.60", 0.6, 1)]
    limit = 2 * BUCKET * 1.1 / 1e6
    for side in ("sender", "receiver"):
        rows.append(
            (f"rise of the {side}'s resident set, MB", found[f"memory/{side}_mb"], f"<= {limit:.1f}", limit, -1)
        )
    if "load/stall_ratio" in found:
        rows.append(("stall / bare load", found["load/stall_ratio"], "<= 1.15", 1.15, -1))
        sync = found["transfer/ours_s"] + found["load/stall_s"]
        found["attest/share_of_sync"] = found["attest/seconds"] / sync
        rows.append(("attestation / whole sync", found["attest/share_of_sync"], "<= 0.05", 0.05, -1))
    if "delta/share_of_full" in found:
        rows.append(("largest delta / full bytes", found["delta/share_of_full"], "<= 0.05", 0.05, -1))
        rows.append(("chained deltas bit-exact", found["delta/bit_exact"], "== 1", 1.0, 1))
    return [(what, seen, want, (seen - bound) * sign >= 0) for what, seen, want, bound, sign in rows]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace bench weights", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--json", type=Path, help="also write one JSON object to this file")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="length of the chain of deltas; 0 leaves it out")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--no-engine", action="store_true", help="leave vLLM out (no load, no stall)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    weights = load(args.model)
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as scratch:
        found = asyncio.run(transfer(weights, args.repeats, scratch))
        os.sched_setaffinity(0, cores)
        if args.steps:
            found |= delta(weights, args.steps, args.lr, scratch)
        if not args.no_engine:
            found |= asyncio.run(stall(args.model, weights, args.repeats, scratch))
    held = verdicts(found)
    for key, value in found.items():
        print(f"{key:32} {value:10.4f}")
    print()
    for what, seen, want, holds in held:
        print(f"{what:40} {seen:8.3f}  {want:8}  {'holds' if holds else 'DOES NOT HOLD'}")
    if args.json:
        args.json.write_text(json.dumps({**found, "held": {w: h for w, _, _, h in held}}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
