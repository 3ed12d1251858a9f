"""What does bringing a version to an engine cost, and how much of it is its proof? Each side has a core.

    raw        one broadcast of everything, from memory into memory that is there already: what the path can do at all
    hot        the same number of bytes, but one bucket over and over: what sockets do with what the cache holds anyway
    plain      one broadcast per tensor into fresh memory, no digests: what most systems do
    unproven   ours without digests
    ours       buckets into the spool, digests on both sides

The ways take turns in one run, and `ours` and `unproven` swap places every round, so that the difference of the two in
the same round is the proof's cost and not the machine's mood.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash

from benchmarks.light_process import Remote, serve
from learner.weight_sender import WeightSender
from rollout.engine import Rendezvous
from rollout.versions import WeightManifest
from rollout.weight_group import GlooGroup
from rollout.weight_inbox import manifest_from_plain, manifest_to_plain, receive
from rollout.weight_spool import Spool
from rollout.weight_stream import as_bytes

Weights = dict[str, torch.Tensor]
Way = Callable[[], Any]


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


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Wall seconds, processor seconds of the whole process, and the rise of its resident set."""
    wall, cpu = time.perf_counter(), time.process_time()
    _, risen = rise(work)
    return {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "rise": risen}


class _NoProof:
    """A digest of nothing at no cost."""

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 32


def unproven(work: Callable[[], Any]) -> None:
    """`work` with digests that look at nothing, on whichever side this is."""
    real, xxhash.xxh3_128 = xxhash.xxh3_128, _NoProof  # type: ignore[misc]
    try:
        work()
    finally:
        xxhash.xxh3_128 = real  # type: ignore[misc]


# --- the engine's side ------------------------------------------------------------------------------------------------


def receiver(connection: Connection, spool_dir: str, bucket: int) -> None:
    """A process of its own on core 1."""
    os.sched_setaffinity(0, {min(1, (os.cpu_count() or 1) - 1)})
    torch.set_num_threads(1)
    spool, groups, whole = Spool(spool_dir), {}, []

    def take(manifest: WeightManifest) -> None:
        spool.promote(receive(groups["now"], manifest, spool, bucket))

    def run(op: str, a: dict[str, Any]) -> Any:
        if op == "enter":
            groups["now"] = GlooGroup.enter(Rendezvous(**a["rendezvous"]))
            whole.append(torch.ones(a["nbytes"], dtype=torch.uint8))
            return None
        group, manifest = groups["now"], manifest_from_plain(a)
        group.start_clock()
        ways: dict[str, Way] = {
            "ours": lambda: take(manifest),
            "unproven": lambda: unproven(lambda: take(manifest)),
            "plain": lambda: _receive_plain(group, manifest),
            "raw": lambda: _raw(group, whole[0]),
            "hot": lambda: _hot(group, manifest.nbytes, bucket),
        }
        return timed(ways[op])

    async def handle(op: str, a: dict[str, Any]) -> Any:
        return await asyncio.to_thread(run, op, a)

    asyncio.run(serve(connection, handle))


def _receive_plain(group: GlooGroup, manifest: WeightManifest) -> None:
    fresh = []
    for t in manifest.tensors:
        fresh.append(torch.empty(t.nbytes, dtype=torch.uint8))
        group.wait(group.broadcast(fresh[-1]))


# --- the learner's side -----------------------------------------------------------------------------------------------


def _send_plain(group: GlooGroup, weights: Weights) -> None:
    group.start_clock()
    for tensor in weights.values():
        group.wait(group.broadcast(as_bytes(tensor)))


def _raw(group: GlooGroup, whole: torch.Tensor) -> None:
    """Either side: one broadcast of everything, from memory to memory that is there already."""
    group.start_clock()
    group.wait(group.broadcast(whole))


def _hot(group: GlooGroup, nbytes: int, bucket: int) -> None:
    """Either side."""
    buffer = torch.empty(bucket, dtype=torch.uint8)
    group.start_clock()
    for start in range(0, nbytes, bucket):
        group.wait(group.broadcast(buffer[: min(bucket, nbytes - start)]))


async def transfer(weights: Weights, repeats: int, scratch: str, bucket: int) -> dict[str, float]:
    """Medians over `repeats` rounds; one round before them only warms up. Keys: transfer/*, attest/*, memory/*."""
    os.sched_setaffinity(0, {0})
    sender = WeightSender(lambda: weights.items(), bucket_bytes=bucket)
    remote = Remote(receiver, scratch, bucket)
    rendezvous = sender.invite(["receiver"])["receiver"]
    manifest = sender.announce(1)
    asked = {"rendezvous": asdict(rendezvous), "nbytes": manifest.nbytes}
    await asyncio.gather(remote.call("enter", asked), asyncio.to_thread(sender.enter))
    group = sender._group
    whole = torch.cat([as_bytes(t) for t in weights.values()])
    assert group is not None
    ways: dict[str, Way] = {
        "raw": lambda: _raw(group, whole),
        "hot": lambda: _hot(group, manifest.nbytes, bucket),
        "plain": lambda: _send_plain(group, weights),
        "unproven": lambda: unproven(lambda: sender.send(manifest)),
        "ours": lambda: sender.send(manifest),
    }
    rounds: list[dict[str, tuple[float, dict[str, float], dict[str, float]]]] = []
    for k in range(repeats + 1):
        order = ["raw", "hot", "plain", *(("unproven", "ours") if k % 2 else ("ours", "unproven"))]
        rounds.append({})
        for way in order:
            started = time.perf_counter()
            received, sent = await asyncio.gather(
                remote.call(way, manifest_to_plain(manifest)), asyncio.to_thread(timed, ways[way])
            )
            rounds[-1][way] = time.perf_counter() - started, sent, received
    await remote.close()
    sender.close()
    return _summary(rounds[1:], manifest.nbytes)


def _summary(rounds: list[dict[str, Any]], nbytes: int) -> dict[str, float]:
    found = {f"transfer/{way}_s": statistics.median(r[way][0] for r in rounds) for way in rounds[0]}
    found["transfer/gb"] = nbytes / 1e9
    found["transfer/share_of_path"] = found["transfer/raw_s"] / found["transfer/ours_s"]
    found["transfer/share_of_hot_path"] = found["transfer/hot_s"] / found["transfer/ours_s"]
    costs = sorted(r["ours"][0] - r["unproven"][0] for r in rounds)
    low, middle, high = statistics.quantiles(costs, n=4)
    found |= {"attest/seconds": middle, "attest/quarter_s": low, "attest/three_quarters_s": high}
    for i, side in ((1, "sender"), (2, "receiver")):
        found[f"attest/{side}_cpu_s"] = statistics.median(r["ours"][i]["cpu"] - r["unproven"][i]["cpu"] for r in rounds)
        found[f"transfer/{side}_cpu_s"] = statistics.median(r["ours"][i]["cpu"] for r in rounds)
        found[f"memory/{side}_mb"] = max(r["ours"][i]["rise"] for r in rounds) / 1e6
    return found
