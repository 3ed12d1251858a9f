"""From a topology to what the ledger needs to know; the one place where the two vocabularies meet."""

from __future__ import annotations

from launch.config import RunConfig
from learner.presets import Setting, resolve
from rollout.ledger_states import LedgerSettings


def algorithm_setting(config: RunConfig) -> Setting:
    """What the rest of the run says that an algorithm's choice may contradict."""
    s = config.sampling
    negative = any(r.weight < 0 or r.kind == "overlong" for r in config.rewards)
    return Setting(s.group_size, s.max_tokens, negative_rewards=negative)


def ledger_settings(config: RunConfig) -> LedgerSettings:
    """The ledger of this run."""
    choices = resolve(config.algorithm, algorithm_setting(config))
    q = config.topology.queue
    return LedgerSettings(
        groups_per_step=config.algorithm.groups_per_step,
        group_size=config.sampling.group_size,
        bound=config.staleness.bound,
        mode=config.staleness.mode,
        window=config.staleness.window,
        max_steps=config.run.steps,
        lease_s=q.lease_s,
        group_deadline_s=q.group_deadline_s,
        max_attempts=q.max_attempts,
        min_viable=q.min_viable,
        zero_signal="drop" if choices.drop_zero_signal else "train",
    )
