"""Proves, with DeepSpeed's ZeRO-3 on two ranks over gloo: while a version is sent, memory rises by two buckets and the
tensor that is gathered on the rank that sends, by the gathered tensor on the other, by two buckets on the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.tiny_llama import write_byte_llama
from learner import heap
from rollout.meeting import free_port

BUCKET = 8 << 20
RANK = Path(__file__).with_name("zero3_rank.py")


SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 64,
}  # 85 MB in bfloat16, 3 MB of it the largest matrix


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_memory_of_a_sending_under_zero_3(tmp_path) -> None:
    model = tmp_path / "model"
    write_byte_llama(model, 0, "bfloat16", **SHAPE)
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(""))}
    environment |= heap.ENVIRONMENT | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    ranks = [
        subprocess.Popen([sys.executable, RANK, model, tmp_path, str(BUCKET)], env={**environment, "RANK": str(r)})
        for r in range(2)
    ]
    try:
        assert [r.wait(560) for r in ranks] == [0, 0]
    finally:
        for r in ranks:
            r.kill()
    zero, one = (json.loads((tmp_path / f"rank-{r}.json").read_text()) for r in range(2))
    gathered = 2 * zero["largest"]  # as DeepSpeed gathers it, and the copy that outlives the gather
    assert zero["nbytes"] > 80e6
    assert zero["sender"] <= 1.1 * 2 * BUCKET + gathered, zero
    assert zero["receiver"] <= 1.1 * 2 * BUCKET, zero
    assert one["other"] <= gathered + (2 << 20), one
