"""Proves: deltas are lossless for any bytes, also fifty in a row, and small when little changed; a store gives every
reader, early, late or returning, exactly the published bytes; damage anywhere in it is refused by name; old versions go
and what is needed stays."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rollout import weight_delta
from rollout.errors import DeadlineError, WeightError
from rollout.versions import WeightManifest
from rollout.weight_inbox import WeightInbox
from rollout.weight_spool import Spool
from rollout.weight_store import WeightStore
from rollout.weight_stream import views


@settings(deadline=None, max_examples=80)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 300), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_a_delta_is_lossless(itemsize: int, n: int, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, n * itemsize, dtype=np.uint8)
    new = np.where(rng.random(len(old)) < share, rng.integers(0, 256, len(old), dtype=np.uint8), old)
    base = old.copy()
    weight_delta.apply(base, weight_delta.encode(old, new, itemsize), itemsize)
    assert (base == new).all()


def test_a_delta_that_is_not_of_this_tensor_is_refused() -> None:
    old, new = np.zeros(800, np.uint8), np.zeros(800, np.uint8)
    new[-1] = 1
    delta = weight_delta.encode(old, new, 2)
    with pytest.raises(WeightError, match="changes element 399 of 10"):
        weight_delta.apply(np.zeros(20, np.uint8), delta, 2)
    with pytest.raises(WeightError, match="decompressed"):
        weight_delta.apply(old, weight_delta.Delta(1, b"junk", delta.xor), 2)
    with pytest.raises(WeightError, match="holds"):
        weight_delta.apply(old, weight_delta.Delta(2, delta.gaps, delta.xor), 2)


class Learner:
    """fp32 master weights under Adam-like steps of the size of `lr`, served in bf16."""

    def __init__(self, lr: float = 1e-6) -> None:
        self.g, self.lr = torch.Generator().manual_seed(0), lr
        self.master = {
            "embed.weight": 0.05 * torch.randn(500, 64, generator=self.g),
            "norm.weight": torch.ones(64),
            "out.weight": 0.05 * torch.randn(300, 64, generator=self.g),
        }

    def step(self) -> None:
        for t in self.master.values():
            t += self.lr * torch.randn(t.shape, generator=self.g).sign()

    def serving(self):
        return [(n, t.bfloat16()) for n, t in self.master.items()]


def same(staged, serving) -> bool:
    return all(
        torch.equal(a, b) for (_, a), (_, b) in zip(views(staged.manifest, staged.bytes()), serving, strict=True)
    )


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_fifty_chained_deltas_are_bit_exact_and_small(tmp_path, scheme) -> None:
    url = str(tmp_path / "s") if scheme == "file" else "memory://fifty"
    learner, store, spool = Learner(), WeightStore(url, anchor_every=1000, scratch=tmp_path), Spool(tmp_path)
    sizes = []
    for version in range(51):
        published = store.publish(version, learner.serving())
        sizes.append(published.nbytes)
        spool.promote(store.fetch(version, spool))
        assert same(spool.serving, learner.serving()) and spool.serving.root == published.root
        learner.step()
    full = published.manifest.nbytes
    assert max(sizes[1:]) < 0.05 * full, f"{max(sizes[1:])} of {full} bytes"
    late = store.fetch(50, Spool(tmp_path))  # a joiner walks all fifty
    assert late.root == spool.serving.root and (late.bytes() == spool.serving.bytes()).all()


def test_an_anchor_is_a_weights_file_that_everybody_reads(tmp_path) -> None:
    learner = Learner()
    published = WeightStore(str(tmp_path)).publish(3, learner.serving())
    read = load_file(tmp_path / published.file)
    assert read.keys() == learner.master.keys()
    assert all(torch.equal(read[n], t) for n, t in learner.serving())


def test_a_delta_that_saves_nothing_becomes_an_anchor(tmp_path) -> None:
    learner, store = Learner(lr=1.0), WeightStore(str(tmp_path))
    store.publish(0, learner.serving())
    learner.step()
    assert store.publish(1, learner.serving()).base == -1


def test_a_changed_layout_becomes_an_anchor(tmp_path) -> None:
    learner, store = Learner(), WeightStore(str(tmp_path))
    store.publish(0, learner.serving())
    assert store.publish(1, learner.serving()[:2]).base == -1


def test_old_versions_go_and_what_is_needed_stays(tmp_path) -> None:
    learner, store = Learner(), WeightStore(str(tmp_path), anchor_every=4, keep_anchors=2)
    for version in range(14):
        store.publish(version, learner.serving())
        learner.step()
    assert store.versions() == list(range(8, 14))
    assert len(list(tmp_path.glob("*.safetensors"))) == 6
    for version in store.versions():
        store.fetch(version, Spool(tmp_path))
    with pytest.raises(WeightError, match="version 3 is not in the store"):
        store.manifest(3)


def test_the_store_stays_bounded_though_learners_die_while_they_write(tmp_path) -> None:
    learner, store, sizes = Learner(), WeightStore(str(tmp_path), anchor_every=4, keep_anchors=2), []
    for version in range(120):
        if version % 7 == 3:  # one wrote a version and died before it published it
            for leftover in (f"v{version:08d}.anchor.safetensors", f"v{version:08d}.json.new"):
                (tmp_path / leftover).write_bytes(b"x" * 100_000)
            store = WeightStore(str(tmp_path), anchor_every=4, keep_anchors=2)
        published = store.publish(version, learner.serving())
        assert same(store.fetch(version, Spool(tmp_path)), learner.serving())
        learner.step()
        sizes.append(sum(f.stat().st_size for f in tmp_path.iterdir()))
    full = published.manifest.nbytes
    assert max(sizes) < 4 * full, f"{max(sizes) / full:.1f} versions, {sorted(f.name for f in tmp_path.iterdir())}"


def test_a_restarted_learner_goes_on_with_an_anchor(tmp_path) -> None:
    learner = Learner()
    WeightStore(str(tmp_path)).publish(0, learner.serving())
    learner.step()
    assert WeightStore(str(tmp_path)).publish(1, learner.serving()).base == -1
    assert same(WeightStore(str(tmp_path)).fetch(1, Spool(tmp_path)), learner.serving())


def test_waiting_for_a_version_ends_when_it_comes_or_at_the_deadline(tmp_path) -> None:
    store = WeightStore(str(tmp_path))
    with pytest.raises(DeadlineError, match="publish version 0"):
        store.wait_for(0, 0.1)
    thread = threading.Timer(0.1, lambda: WeightStore(str(tmp_path)).publish(0, Learner().serving()))
    thread.start()
    assert store.wait_for(0, 10).manifest.version == 0
    thread.join()


def flip(path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["flip data", "flip header", "truncate", "remove", "manifest", "swap"])
@pytest.mark.parametrize("kind", ["anchor", "delta"])
def test_damage_is_refused(tmp_path, kind, damage) -> None:
    learner, store, spool = Learner(), WeightStore(str(tmp_path)), Spool(tmp_path)
    for version in range(3):
        store.publish(version, learner.serving())
        learner.step()
    spool.promote(store.fetch(0, spool))
    (victim,) = tmp_path.glob("v00000000.anchor*" if kind == "anchor" else "v00000002.delta*")
    if damage == "flip data":
        flip(victim, 0.9)
    elif damage == "flip header":
        flip(victim, 20 / victim.stat().st_size)
    elif damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:-5])
    elif damage == "remove":
        victim.unlink()
    elif damage == "swap":
        (other,) = tmp_path.glob("v00000001.delta*")
        victim.write_bytes(other.read_bytes())
    else:
        path = tmp_path / ("v00000000.json" if kind == "anchor" else "v00000002.json")
        text = json.loads(path.read_text())
        text["tensors"][0][4] = "0" * 32
        path.write_text(json.dumps(text))
    reader = Spool(tmp_path) if kind == "anchor" else spool
    with pytest.raises(WeightError):
        store.fetch(2, reader)
    assert spool.serving.manifest.version == 0


def test_a_pull_that_waits_for_a_version_ends_when_it_is_discarded(tmp_path) -> None:
    """Its successor may start at once, and the one before can no longer write where that one writes."""
    inbox = WeightInbox(1 << 16, tmp_path)
    for version in (2, 3):  # neither will ever be published
        inbox.fetch(str(tmp_path / "store"), WeightManifest(version, ()), timeout_s=60.0)
        thread = inbox._thread
        assert inbox.status().state == "staging" and inbox.status().version == version
        inbox.discard()
        thread.join(5.0)
        assert not thread.is_alive() and inbox.status().state == "idle"
