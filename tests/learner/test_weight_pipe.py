"""Proves: whatever the sizes of tensors and buckets, the pieces that arrive are the tensors' bytes, end to end, though
each is read only when it is waited for, as late as can be; digests are the tensors' own; two buckets are all memory."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.weight_pipe import WeightPipe
from rollout.versions import TensorSpec, WeightManifest
from rollout.weight_stream import digest, pieces

NOTHING = torch.empty(0, dtype=torch.uint8)


class LateGroup:
    """Delivers what a buffer holds when the sender waits for it: the latest moment at which gloo may read it."""

    def __init__(self) -> None:
        self.flying: dict[int, torch.Tensor] = {}
        self.arrived: dict[int, torch.Tensor] = {}
        self.serial = self.most = 0

    def broadcast(self, buffer: torch.Tensor) -> int:
        self.serial += 1
        self.flying[self.serial] = buffer
        self.most = max(self.most, sum(b.numel() for b in self.flying.values()))
        return self.serial

    def wait(self, ticket: int) -> None:
        self.arrived[ticket] = self.flying.pop(ticket).clone()


def piped(sizes: list[int], bucket: int, complete: int) -> tuple[LateGroup, list[str], list[torch.Tensor]]:
    """Push the first `complete` tensors, then pad and finish."""
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    specs = tuple(TensorSpec(str(i), "uint8", (n,), n, "") for i, n in enumerate(sizes))
    group, manifest = LateGroup(), WeightManifest(1, specs)
    pipe = WeightPipe(group, manifest, bucket)  # type: ignore[arg-type]
    digests = []
    for t in tensors[:complete]:
        alive = t.clone()
        digests.append(pipe.push(alive))
        alive.fill_(0)  # the tensor dies as soon as it was pushed
    pipe.pad()
    pipe.finish(torch.zeros(1, dtype=torch.uint8))
    return group, digests, tensors


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 200))
def test_what_arrives_is_what_was_pushed(sizes: list[int], bucket: int) -> None:
    group, digests, tensors = piped(sizes, bucket, len(sizes))
    *arrived, _ = [group.arrived[k] for k in sorted(group.arrived)]
    assert [a.numel() for a in arrived] == [p.end - p.start for p in pieces(sum(sizes), bucket)]
    assert torch.equal(torch.cat([NOTHING, *arrived]), torch.cat([NOTHING, *tensors]))
    assert digests == [digest(t).hex() for t in tensors] and not group.flying and group.most <= 2 * bucket


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(1, 200), st.integers(0, 7))
def test_a_sender_that_gives_up_still_sends_every_piece(sizes: list[int], bucket: int, complete: int) -> None:
    group, _, _ = piped(sizes, bucket, min(complete, len(sizes)))
    assert sum(a.numel() for a in group.arrived.values()) == sum(sizes) + 1
