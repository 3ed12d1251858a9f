"""What every sender of weights knows: what it yields, who is in the group of this epoch, what one sending was.

    Layout          names, types and shapes of what a source yields; holds what is yielded against what was announced
    EpochSender     invite -> enter -> [announce -> send]* -> close_group

How members meet and how bytes go is said by `weight_sender` (gloo), `nccl_sender` and `ipc_sender`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from rollout.engine import Rendezvous
from rollout.errors import WeightError
from rollout.versions import AdapterSpec, WeightManifest
from rollout.weight_stream import NamedTensor, root_digest, sealed, spec_of

Source = Callable[[], Iterable[NamedTensor]]
Group = TypeVar("Group")


@dataclass(frozen=True, slots=True)
class Sent:
    """What one sending was: `Sent(manifest, root="9f2c...", nbytes=269060352, seconds=0.21)`."""

    manifest: WeightManifest
    root: str
    nbytes: int
    seconds: float

    @classmethod
    def proven(cls, manifest: WeightManifest, digests: Sequence[str], seconds: float) -> Sent:
        """The announced manifest with the digests of what was sent."""
        proven = sealed(manifest, digests)
        return cls(proven, root_digest(proven), manifest.nbytes, seconds)


class Layout:
    """Names, types and shapes of what a source yields: walked once, then known without the bytes."""

    def __init__(self, source: Source, adapter: AdapterSpec | None = None) -> None:
        self.source, self._adapter = source, adapter
        self._known: WeightManifest | None = None

    def manifest(self, version: int) -> WeightManifest:
        """What `version` will consist of, without digests."""
        if self._known is None:
            self._known = WeightManifest(version, tuple(spec_of(name, t) for name, t in self.source()), self._adapter)
        return replace(self._known, version=version)

    def tensors(self, manifest: WeightManifest) -> Iterator[NamedTensor]:
        """What the source yields now. Raises WeightError at the first tensor that is not what `manifest` announced."""
        announced = 0
        for name, tensor in self.source():
            if announced == len(manifest.tensors):
                raise WeightError(f"the learner yielded {name}, which was not announced; announce again")
            spec, got = manifest.tensors[announced], spec_of(name, tensor)
            if (got.name, got.dtype, got.shape) != (spec.name, spec.dtype, spec.shape):
                raise WeightError(
                    f"the learner yielded {got.name} {got.dtype}{list(got.shape)} where "
                    f"{spec.name} {spec.dtype}{list(spec.shape)} was announced; announce again"
                )
            announced += 1
            yield name, tensor
        if announced < len(manifest.tensors):
            missing = manifest.tensors[announced].name
            raise WeightError(f"the learner yielded {announced} tensors; {missing} was announced and is missing")


class EpochSender(ABC, Generic[Group]):
    """A sender to a group of named members. Blocking calls, one at a time, from any thread."""

    def __init__(self, source: Source, adapter: AdapterSpec | None, bucket_bytes: int, timeout_s: float) -> None:
        self.bucket_bytes, self.timeout_s = bucket_bytes, timeout_s
        self.epoch = 0
        self._layout = Layout(source, adapter)
        self._members: tuple[str, ...] = ()
        self._group: Group | None = None

    def invite(self, members: Sequence[str]) -> dict[str, Rendezvous]:
        """Begin a new epoch with these engines (the one before is torn down); hand each its rendezvous."""
        if not members:
            raise WeightError("no engine is left to send weights to; start one, it joins by itself")
        self.close_group()
        self.epoch += 1
        self._members = tuple(members)
        return self._meet()

    @abstractmethod
    def _meet(self) -> dict[str, Rendezvous]:
        """Where the members of this epoch meet."""

    @abstractmethod
    def enter(self) -> None:
        """Wait for every invited engine; DeadlineError names those that did not come."""

    def announce(self, version: int) -> WeightManifest:
        """What `version` will consist of. The layout is read from the source once and then held against it."""
        return self._layout.manifest(version)

    @abstractmethod
    def send(self, manifest: WeightManifest) -> Sent:
        """Send one announced version to the group. Raises WeightError, DeadlineError, and what the source raises."""

    def _entered(self, manifest: WeightManifest) -> Group:
        if self._group is None:
            raise WeightError(f"no weight group to send version {manifest.version} to; invite engines first")
        return self._group

    @abstractmethod
    def close_group(self) -> None:
        """End the epoch; engines that wait for us, or for each other, see it at once. Idempotent."""

    @property
    def in_group(self) -> bool:
        return self._group is not None

    def close(self) -> None:
        self.close_group()
