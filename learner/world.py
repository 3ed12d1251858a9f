"""The ranks of one learner: how they meet, and the one way they add numbers up.

Several ranks are named by the usual environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); alone, no port is
opened. `add_up` returns the same float64 vector on every rank; it is the `Reduce` of learner/segments.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.errors import ConfigError


@dataclass(frozen=True, slots=True)
class World:
    """World(rank=0, size=1, device=cpu)."""

    rank: int
    size: int
    device: torch.device

    @staticmethod
    def join(device: str | torch.device, timeout_s: float) -> World:
        """Enter the default process group, making it if need be. A rank that stays away is a DistStoreError in time."""
        device = torch.device(device)
        if not dist.is_initialized():
            backend, patience = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                dist.init_process_group(backend, timeout=patience)
            else:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=patience)
        return World(dist.get_rank(), dist.get_world_size(), device)

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over ranks, on the device it came from."""
        if self.size == 1:
            return x
        total = x.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(x.device)

    def most(self, value: int) -> int:
        """The largest of the ranks' integers."""
        if self.size == 1:
            return value
        largest = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, all of one shape and type, in rank order."""
        if self.size == 1:
            return [x]
        found = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x)
        return found

    def agree(self, value: int) -> bool:
        """Whether every rank has the same integer."""
        return len({int(x) for x in self.gather(torch.tensor([value], dtype=torch.int64, device=self.device))}) == 1

    def meet(self) -> None:
        """Nobody goes on before everybody is here."""
        if self.size > 1:
            dist.barrier()

    def check(self, ranks: int) -> None:
        """ConfigError when the processes that met are not the ranks the topology wanted."""
        if ranks != self.size:
            raise ConfigError(
                f"topology.learner.ranks is {ranks} but {self.size} processes met; set RANK and WORLD_SIZE"
            )
