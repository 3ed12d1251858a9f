"""Every online preset learns: a policy of a few logits, whose expected reward is a closed formula, reaches its target
with answers that are 0 or 4 updates old and log-probs that carry engine noise, through compute and policy_loss; with
the sign of the loss turned round it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import algorithms
from learner.preference import dpo_sigmoid
from learner.presets import PRESETS


@pytest.mark.parametrize("staleness", [0, 4])
@pytest.mark.parametrize("preset", algorithms.online())
def test_reaches_the_target(preset: str, staleness: int) -> None:
    assert algorithms.learn(preset, staleness, seed=0) < 60


def test_the_target_is_far_from_chance_and_not_reached_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test can fail: the loss turned round never gets there."""
    honest = algorithms.policy_loss

    def turned(*args: object, **kwargs: object) -> tuple[Tensor, object]:
        loss, metrics = honest(*args, **kwargs)  # type: ignore[arg-type]
        return -loss, metrics

    monkeypatch.setattr(algorithms, "policy_loss", turned)
    assert algorithms.learn("dapo", 0, seed=0, steps=60) == 60


def test_the_table_names_every_online_preset() -> None:
    results = {name: dict.fromkeys(algorithms.STALENESS, 20.0) for name in algorithms.online()}
    page = algorithms.markdown(results)
    assert all(f"| `{name}` |" in page for name in PRESETS if PRESETS[name].objective == "policy")


def test_dpo_raises_the_margin_of_the_preferred_answers() -> None:
    """Eight answers with hidden qualities, all pairs labelled: the log-ratios end up in the order of quality."""
    g = torch.Generator().manual_seed(0)
    quality = torch.randn(8, generator=g)
    better, worse = (torch.triu_indices(8, 8, 1)[i] for i in (0, 1))
    flip = quality[better] < quality[worse]
    chosen, rejected = torch.where(flip, worse, better), torch.where(flip, better, worse)
    logits = torch.zeros(8, requires_grad=True)
    adam = torch.optim.Adam([logits], lr=0.1)
    for _ in range(60):
        adam.zero_grad()
        logp = torch.log_softmax(logits, -1)
        dpo_sigmoid(logp[chosen] - logp[rejected], 1.0).mean().backward()
        adam.step()
    assert logits.detach().argsort().tolist() == quality.argsort().tolist()
