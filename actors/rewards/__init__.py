"""What an answer is worth. Rewards are other people's code: they run in processes of their own, which may be killed.

    verifiers   exact, contains, regex, numeric, math, reasoning_gym: pure functions of (answer, meta)
    components  one entry of `rewards:` -> a callable; runs inside the worker process
    worker      the process: JSON lines in, JSON lines out, limits on memory
    process     its other end: deadline, kill, respawn
    breaker     takes a component that only fails out of service for a while
    shaping     what is computed from lengths alone, in this process
    scorer      all of it together: score(prompt, answers) -> verdicts

To add a verifier: one function in verifiers.py. To use your own: `{kind: function, path: "my_rewards:brevity"}`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.rewards.scorer import Scorer, build, check

__all__ = ["Scorer", "build", "check"]


def __getattr__(name: str) -> Any:
    """Loaded on first use: worker processes live in this package too, and start five times faster without the owner's
    side (numpy, pydantic)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from actors.rewards import scorer

    return getattr(scorer, name)
