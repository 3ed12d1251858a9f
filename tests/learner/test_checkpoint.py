"""Proves that a checkpoint is whole or is not there: every prefix of a killed write, every flipped or missing byte, is
either invisible or refused with its name, and the newest whole one is found behind it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from learner import checkpoint
from learner.checkpoint import TornCheckpoint


def make(root: Path, version: int, shard_bytes: int = 64) -> Path:
    path = checkpoint.path_of(root, version)
    writer = checkpoint.Writer(path, shard_bytes)
    for i in range(5):
        writer.add(f"master/w{i}", torch.full((4, 4), float(version + i)))
    writer.commit(version, {"adam_steps": float(version)})
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = make(tmp_path, 7)
    manifest = checkpoint.read_manifest(path)
    assert manifest.version == 7 and manifest.numbers == {"adam_steps": 7.0} and len(manifest.shards) == 5
    read = dict(checkpoint.tensors(path, manifest))
    assert read.keys() == {f"master/w{i}" for i in range(5)}
    assert all(torch.equal(t, torch.full((4, 4), 7.0 + int(n[-1]))) for n, t in read.items())


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "manifest", "half a manifest"])
def test_damage_is_named_and_passed_over(tmp_path: Path, damage: str) -> None:
    make(tmp_path, 3)
    path = make(tmp_path, 4)
    shard, manifest = path / "state-00002.safetensors", path / checkpoint.MANIFEST
    data = shard.read_bytes()
    match damage:
        case "truncate":
            shard.write_bytes(data[:-1])
        case "flip":
            shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "delete":
            shard.unlink()
        case "manifest":
            manifest.unlink()
        case "half a manifest":
            manifest.write_text(manifest.read_text()[:40])
    with pytest.raises(TornCheckpoint, match="manifest" if "manifest" in damage else "state-00002"):
        checkpoint.read_manifest(path)
    found, passed = checkpoint.latest(tmp_path)
    assert found == checkpoint.path_of(tmp_path, 3) and len(passed) == 1 and str(path) in passed[0]


def test_a_writer_that_dies_leaves_nothing_visible(tmp_path: Path) -> None:
    make(tmp_path, 1)
    writer = checkpoint.Writer(checkpoint.path_of(tmp_path, 2), 64)
    writer.add("master/w0", torch.zeros(64))
    assert checkpoint.latest(tmp_path) == (checkpoint.path_of(tmp_path, 1), [])
    checkpoint.prune(tmp_path, keep=1)
    assert os.listdir(tmp_path) == ["v00000001"]


def test_an_error_while_gathering_leaves_nothing(tmp_path: Path) -> None:
    def failing():  # type: ignore[no-untyped-def]
        yield "master/a", torch.zeros(2)
        raise RuntimeError("a rank went away")

    with pytest.raises(RuntimeError, match="a rank went away"):
        checkpoint.write(tmp_path / "v00000001", failing(), 1, {}, writes=True)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    path = make(tmp_path, 5)
    writer = checkpoint.Writer(path)
    writer.add("master/other", torch.ones(1))
    writer.commit(5, {})
    assert dict(checkpoint.tensors(path, checkpoint.read_manifest(path))).keys() == {"master/other"}
    assert os.listdir(tmp_path) == ["v00000005"]


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for version in range(1, 6):
        make(tmp_path, version)
    shutil.rmtree(checkpoint.path_of(tmp_path, 5))
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["v00000003", "v00000004"]
