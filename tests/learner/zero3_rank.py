"""One rank of tests/learner/test_weight_memory.py: a learner under ZeRO-3 sends its weights; how far does memory rise?

python tests/learner/zero3_rank.py MODEL_DIR SCRATCH BUCKET_BYTES      (RANK, WORLD_SIZE, MASTER_* are set)
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.light_process import Remote
from benchmarks.weight_transfer import receiver, rise
from learner import presets
from learner.config import AlgorithmConfig, LearnerConfig
from learner.engine import LearnerEngine
from learner.weight_sender import WeightSender, gather_along
from rollout.weight_inbox import manifest_to_plain

WALKS = 3  # the announcement reads the layout; the first sending warms up; the second is measured


def learner_of(model_dir: Path) -> LearnerEngine:
    algorithm = AlgorithmConfig.model_validate({"preset": "grpo"})
    config = LearnerConfig.model_validate({"ranks": 2, "zero_stage": 3, "compute_dtype": "bfloat16", "timeout_s": 60.0})
    choices, weights = presets.resolve(algorithm), {"exact": 1.0}
    return LearnerEngine(
        model_dir, choices, algorithm, config, serving_dtype="bfloat16", component_weights=weights, max_tokens=8
    )


async def send(learner: LearnerEngine, scratch: str, bucket: int) -> dict[str, Any]:
    sender = WeightSender(learner.state_tensors, bucket_bytes=bucket, timeout_s=60.0)
    remote = Remote(receiver, scratch, bucket)
    invited = sender.invite(["engine"])["engine"]
    manifest = sender.announce(1)
    asked = {"rendezvous": asdict(invited), "nbytes": manifest.nbytes}
    await asyncio.gather(remote.call("enter", asked), asyncio.to_thread(sender.enter))
    for _ in range(WALKS - 1):
        received, (sent, risen) = await asyncio.gather(
            remote.call("ours", manifest_to_plain(manifest)), asyncio.to_thread(rise, lambda: sender.send(manifest))
        )
    await remote.close()
    sender.close()
    largest = max(t.nbytes for t in manifest.tensors)
    return {"sender": risen, "receiver": received["rise"], "nbytes": sent.nbytes, "largest": largest}


def main() -> None:
    model_dir, scratch, bucket = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    learner = learner_of(model_dir)
    if learner.world.rank == 0:
        found = asyncio.run(send(learner, scratch, bucket))
    else:
        for _ in range(WALKS):
            _, risen = rise(lambda: gather_along(learner.state_tensors))
        found = {"other": risen}
    Path(scratch, f"rank-{learner.world.rank}.json").write_text(json.dumps(found))
    learner.world.meet()


if __name__ == "__main__":
    main()
