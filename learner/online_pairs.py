"""An optimizer step of a preference objective in the running loop: pairs are formed from the groups of the step.

    groups -> best against worst of each   preference.form_pairs
           -> DPO and its family           preference_step.policy_step
           -> the report of any other step, with the rewards and lengths of all answers taken

A step without a single pair (every group tied) changes nothing and says so: `step/skipped` 1, no ordinals blamed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from learner.look import Updater
from learner.preference import form_pairs
from learner.preference_step import policy_step
from learner.share import Share
from learner.train_step import Report, named
from rollout.types import Group


def run(updater: Updater, groups: Sequence[Group]) -> Report:
    """One optimizer step on the pairs of this rank's share. Collective."""
    started = time.perf_counter()
    share = Share.of(groups, updater.choices, updater.max_tokens)
    pairs = list(form_pairs(groups))
    anywhere = updater.world.most(len(pairs))
    metrics = policy_step(updater, pairs) if anywhere else {"loss/total": 0.0, "grad_norm": 0.0, "step/skipped": 1.0}
    about = share.metrics(updater.version, updater.component_names).reduced(updater.world.add_up).finish()
    own = [sum(int(t.loss_mask.sum()) for pair in pairs for t in (pair.chosen, pair.rejected)), len(pairs)]
    tokens, count = updater.world.add_up(torch.tensor(own, dtype=torch.float64)).tolist()
    elapsed = time.perf_counter() - started
    metrics |= named(about | {"tokens/kept": tokens})
    metrics |= {
        "preference/pairs": count,
        "time/train": elapsed,
        "throughput/learner_tokens_per_s": tokens / elapsed,
    }
    applied = not metrics["step/skipped"] or not anywhere
    return Report(metrics, applied, () if applied else tuple(pair.ordinal for pair in pairs), bad=not applied)
