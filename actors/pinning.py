"""Threads and cores per role. Unpinned BLAS threads in every role cost a third of a step on shared machines."""

from __future__ import annotations

import os
from collections.abc import Sequence


def pin(cores: Sequence[int]) -> None:
    """Keep this process, and all that it starts from now on, on `cores`; () leaves it as it is."""
    if cores:
        os.sched_setaffinity(0, cores)


def thread_environment(threads: int) -> dict[str, str]:
    """Environment of a process that computes with `threads` threads; must be set before torch is imported."""
    libraries = ("OMP", "MKL", "OPENBLAS", "NUMEXPR")
    return {f"{library}_NUM_THREADS": str(max(1, threads)) for library in libraries}
