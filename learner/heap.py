"""Keep freed memory in the process: asking the kernel for the same big tensors every step costs a tenth of it on a CPU.

glibc gives blocks above 32 MB back at once and gets them again page by page; the learner's activations and logits are
such blocks, of the same sizes each step. Peak memory does not change, memory between steps does.
"""

from __future__ import annotations

import ctypes
import sys

# Of a learner's process, from its first breath: one heap serves all threads. With one for each, what a thread gave back
# stays with it, and the thread that sends weights under ZeRO-3 holds 44 MB where 11 MB are enough (two ranks, 86 MB of
# weights in bf16, buckets of 8 MB).
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_FROM_HEAP_BELOW = 1 << 30


def keep() -> bool:
    """Tell glibc; False where there is another allocator, which is then left as it is."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # musl has neither
        return False
    told = mallopt(_MMAP_THRESHOLD, _FROM_HEAP_BELOW), mallopt(_TRIM_THRESHOLD, _FROM_HEAP_BELOW)
    return all(told)
