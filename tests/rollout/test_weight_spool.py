"""Proves: the place of the served version is never the one written; contents survive being released from memory; a
place given up to a runaway writer is not used again."""

from __future__ import annotations

import pytest
import torch

from rollout.versions import WeightManifest
from rollout.weight_spool import Spool, Staged
from rollout.weight_stream import spec_of


def staged(spool: Spool, value: int, n: int = 10_000) -> Staged:
    data = torch.full((n,), value, dtype=torch.uint8)
    place = spool.free()
    place.bytes(n).copy_(data)
    place.release(0, n)
    return Staged(WeightManifest(value, (spec_of("w", data),)), f"root{value}", place)


def test_staging_never_touches_what_is_served(tmp_path) -> None:
    spool = Spool(tmp_path)
    for value in range(1, 6):
        new = staged(spool, value)
        if spool.serving is not None:
            assert (spool.serving.bytes() == value - 1).all()
        spool.promote(new)
        assert spool.serving is new and (new.bytes() == value).all()


def test_only_the_free_place_can_be_promoted(tmp_path) -> None:
    spool = Spool(tmp_path)
    first = staged(spool, 1)
    spool.promote(first)
    with pytest.raises(ValueError, match="free place"):
        spool.promote(first)


def test_an_abandoned_place_is_left_to_its_writer(tmp_path) -> None:
    spool = Spool(tmp_path)
    runaway = spool.free().bytes(4096)
    spool.abandon_free()
    new = staged(spool, 7, 4096)
    runaway.fill_(99)
    assert (new.bytes() == 7).all()


def test_places_leave_no_files_behind(tmp_path) -> None:
    staged(Spool(tmp_path), 1)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_version_is_a_version(tmp_path) -> None:
    assert Spool(tmp_path).free().bytes(0).numel() == 0
