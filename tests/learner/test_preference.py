"""Preference losses and reward models by hand; pairs from groups keep the version filter and drop ties; bad pairs are
counted; pair files are read or refused by line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner import preference
from learner.choices import Choices
from learner.preference_data import PairTokens, read_answers, read_pairs
from learner.segments import Denominators
from rollout.errors import ConfigError
from rollout.types import Failed, Group, Scored, Status, Trajectory, Verdict
from rollout.versions import VersionSpan


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


D = torch.tensor([0.7, -0.4], dtype=torch.float64)


def test_kernels_by_hand() -> None:
    beta, e = 0.5, 0.1
    for d, i in ((0.7, 0), (-0.4, 1)):
        up, down = -math.log(sigmoid(beta * d)), -math.log(sigmoid(-beta * d))
        assert float(preference.dpo_sigmoid(D, beta)[i]) == pytest.approx(up)
        assert float(preference.cdpo(D, beta, e)[i]) == pytest.approx((1 - e) * up + e * down)
        assert float(preference.robust_dpo(D, beta, e)[i]) == pytest.approx(((1 - e) * up - e * down) / (1 - 2 * e))
        assert float(preference.ipo(D, beta)[i]) == pytest.approx((d - 1) ** 2)
        assert float(preference.hinge(D, beta)[i]) == pytest.approx(max(0, 1 - beta * d))


def test_extreme_differences_stay_finite() -> None:
    wild = torch.tensor([1e6, -1e6])
    for x in (
        preference.dpo_sigmoid(wild, 0.1),
        preference.cdpo(wild, 0.1, 0.1),
        preference.robust_dpo(wild, 0.1, 0.1),
    ):
        assert torch.isfinite(x).all()


def run(
    pairs: float = 2.0, poison: bool = False, length_normalized: bool = False
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Four answers of 2, 2, 1 and 0 trainable tokens; pairs (0, 1) and (2, 3)."""
    logp = torch.tensor([-1.0, -0.5, -2.0, -1.0, -0.3, torch.nan], dtype=torch.float64)
    if poison:
        logp[4] = torch.nan
    leaf = logp.requires_grad_()
    c = Choices(preset="t", objective="preference", preference_beta=1.0, length_normalized=length_normalized)
    loss, metrics = preference.preference_loss(
        c, logprobs=leaf, ref_logprobs=torch.full((6,), -1.0).double(), mask=torch.tensor([1, 1, 1, 1, 1, 0]),
        sequence_ids=torch.tensor([0, 0, 1, 1, 2, 3]), n_sequences=4, chosen=torch.tensor([0, 2]),
        rejected=torch.tensor([1, 3]), pairs=pairs,
    )  # fmt: skip
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, metrics.finish()


def test_dpo_over_answers_by_hand_with_an_empty_one() -> None:
    """D = (-1.5 + 2) - (-3 + 2) = 1.5 and (-.3 + 1) - 0 = .7; the empty answer's masked NaN is nothing."""
    loss, grad, metrics = run()
    assert float(loss) == pytest.approx((-math.log(sigmoid(1.5)) - math.log(sigmoid(0.7))) / 2)
    g = -(1 - sigmoid(1.5)) / 2
    assert grad.tolist() == pytest.approx([g, g, -g, -g, -(1 - sigmoid(0.7)) / 2, 0])
    assert metrics["preference/accuracy"] == 1.0 and metrics["preference/nonfinite"] == 0
    averaged, _, _ = run(length_normalized=True)
    assert float(averaged) == pytest.approx((-math.log(sigmoid(0.75)) - math.log(sigmoid(0.7))) / 2)


def test_a_pair_with_nan_gives_no_loss_and_is_counted() -> None:
    loss, grad, metrics = run(poison=True)
    assert float(loss) == pytest.approx(-math.log(sigmoid(1.5)) / 2)
    assert torch.isfinite(grad).all() and grad[4] == 0
    assert metrics["preference/nonfinite"] == 1


def test_global_pair_count_makes_micro_batches_add_up() -> None:
    assert float(run(pairs=4.0)[0]) == pytest.approx(float(run(pairs=2.0)[0]) / 2)


def test_bradley_terry_and_ratings() -> None:
    loss, right = preference.bradley_terry(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0]), margin=0.5)
    assert loss.tolist() == pytest.approx([-math.log(sigmoid(1.5)), -math.log(sigmoid(-1.5))])
    assert right.tolist() == [True, False]
    loss, off = preference.rating_regression(
        torch.tensor([0.5, 1.0, 0.3, 0.3]), torch.tensor([3.0, 4.0, torch.nan, 9.0])
    )
    assert loss.tolist() == pytest.approx([0, 0.0625, 0, 0])
    assert off.tolist() == pytest.approx([0, 1.0, 0, 0])


def test_sft_is_the_mean_over_the_steps_tokens() -> None:
    logp = torch.tensor([-1.0, -3.0, torch.nan, torch.nan]).requires_grad_()
    mask = torch.tensor([1, 1, 0, 1])
    loss, metrics = preference.sft(logp, mask, Denominators(3, 1, 1))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(4 / 3)
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx([-1 / 3, -1 / 3, 0, 0])
    assert metrics.finish()["tokens/nonfinite"] == 1


# ------------------------------------------------------------ pairs


def answer(verdict: Verdict | None, version: int = 5, length: int = 2) -> Trajectory:
    return Trajectory(
        np.zeros(length, np.int32), np.ones(length, bool), np.zeros(length, np.float32),
        (VersionSpan(version, 0, length),) if length else (), Status.FINISHED if length else Status.FAILED, verdict,
    )  # fmt: skip


def group(*answers: Trajectory) -> Group:
    return Group(7, np.zeros(3, np.int32), answers)


def test_best_against_worst() -> None:
    answers = [answer(Scored(x)) for x in (0.2, 0.9, -1.0, 0.9)]
    (pair,) = preference.form_pairs([group(*answers)])
    assert pair.chosen is answers[1] and pair.rejected is answers[2]
    assert pair.margin == pytest.approx(1.9) and pair.ordinal == 7


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [answer(Scored(1.0))],
        [answer(Scored(1.0)), answer(Scored(1.0))],
        [answer(Scored(1.0)), answer(Failed("raised")), answer(None)],
        [answer(Scored(1.0)), answer(Scored(0.0), length=0)],
        [answer(Scored(1.0)), answer(Scored(0.0), version=2)],  # too old
    ],
)
def test_groups_without_a_pair(answers: list[Trajectory]) -> None:
    assert list(preference.form_pairs([group(*answers)], oldest=3)) == []


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return path


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_pair_files(tmp_path: Path) -> None:
    row = {"prompt": "ab", "chosen": "yes", "rejected": "no"}
    path = write(tmp_path / "pairs.jsonl", [row, "", row | {"extra": 1}])
    first, second = read_pairs(path, encode)
    assert isinstance(first, PairTokens)
    assert first.prompt_ids.tolist() == encode("ab") and first.chosen_ids.tolist() == encode("yes")
    assert second.rejected_ids.tolist() == encode("no") and first.chosen_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "nothing in it"),
        (["{"], "line 1"),
        ([{"prompt": "a", "chosen": "b"}], "rejected"),
        ([{"prompt": "a", "chosen": "b", "rejected": 3}], "rejected"),
        ([[1, 2]], "line 1"),
        ([{"prompt": "a", "chosen": "", "rejected": "c"}], "empty"),
        ([{"prompt": "a", "chosen": "c", "rejected": "c"}], "same"),
    ],
)
def test_bad_pair_files_are_refused_by_line(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(read_pairs(write(tmp_path / "bad.jsonl", rows), encode))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_pairs(tmp_path / "missing.jsonl", encode))


def test_answer_files_with_and_without_ratings(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "bc"}, {"prompt": "d", "answer": "e", "rating": 4}]
    first, second = read_answers(write(tmp_path / "answers.jsonl", rows), encode)
    assert len(first.answer_ids) == 2 and np.isnan(first.rating) and second.rating == 4.0
    for row, message in (
        ({"prompt": "a", "answer": ""}, "empty answer"),
        ({"prompt": "a", "answer": "b", "rating": "five"}, "'rating' must be a number"),
        ({"prompt": "a"}, "'answer' must be a text"),
    ):
        with pytest.raises(ConfigError, match=message):
            list(read_answers(write(tmp_path / "bad.jsonl", [row]), encode))
