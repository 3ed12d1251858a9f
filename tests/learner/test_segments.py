"""Sums and means over sequences, every aggregation worked by hand, and denominators that agree across ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.segments import Denominators, Segments, aggregate, token_weights, upcast

# Three answers of 3, 1 and 0 unmasked tokens; the first two share a prompt.
MASK = torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.bool)
IDS = torch.tensor([0, 0, 0, 1, 1, 2])
GROUPS = torch.tensor([0, 0, 1])
LOSS = torch.tensor([1.0, 2.0, 6.0, 10.0, torch.nan, torch.inf], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [
        ("token-mean", 19 / 4),
        ("seq-mean-token-mean", (9 / 3 + 10 / 1) / 2),  # the empty answer is not counted
        ("seq-mean-token-sum", (9 + 10) / 2),
        ("constant", 19 / (2 * 8)),
        ("prompt-mean", 19 / 4),  # one live prompt
        ("sum", 19.0),
    ],
)
def test_aggregations_by_hand(kind: str, by_hand: float) -> None:
    seq, d = Segments(IDS, 3, MASK), Denominators.count(MASK, IDS, GROUPS)
    weights = token_weights(kind, seq, GROUPS, d, 8.0)  # type: ignore[arg-type]
    assert float(aggregate(LOSS, weights, MASK)) == pytest.approx(by_hand, abs=1e-15)


def test_counts() -> None:
    d = Denominators.count(MASK, IDS, GROUPS)
    assert (d.tokens, d.sequences, d.prompts) == (4, 2, 1)
    assert d.tokens_per_group is not None and d.tokens_per_group.tolist() == [4, 0]


def test_denominators_of_two_ranks_are_the_sum_of_their_counts() -> None:
    parts = [Denominators.count(MASK, IDS, GROUPS), Denominators.count(~MASK, IDS, GROUPS)]
    other = torch.tensor([parts[1].tokens, parts[1].sequences, parts[1].prompts], dtype=torch.float64)
    both = Denominators.count(MASK, IDS, GROUPS, reduce=lambda x: x + other)
    assert (both.tokens, both.sequences, both.prompts) == (6, 4, 3)


def test_what_is_missing_is_named() -> None:
    seq, d = Segments(IDS, 3, MASK), Denominators(4, 2, 1)
    for kind, message in (("constant", "length_constant"), ("prompt-mean", "tokens_per_group"), ("median", "median")):
        with pytest.raises(ValueError, match=message):
            token_weights(kind, seq, GROUPS, d, None)  # type: ignore[arg-type]


def test_nothing_at_all() -> None:
    none = torch.zeros(0, dtype=torch.long)
    d = Denominators.count(none.bool(), none, none)
    assert (d.tokens, d.sequences, d.prompts) == (0, 0, 0)
    seq = Segments(none, 0, none.bool())
    assert token_weights("token-mean", seq, none, d, None).shape == (0,)


def test_upcast() -> None:
    assert upcast(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert upcast(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.floats(-5, 5)), max_size=40))
def test_segments_agree_with_loops(tokens: list[tuple[int, bool, float]]) -> None:
    ids = torch.tensor([t[0] for t in tokens], dtype=torch.long)
    mask = torch.tensor([t[1] for t in tokens], dtype=torch.bool)
    x = torch.tensor([t[2] for t in tokens], dtype=torch.float64)
    seq = Segments(ids, 5, mask)
    for i in range(5):
        mine = [v for j, m, v in tokens if j == i and m]
        assert float(seq.sum(x)[i]) == pytest.approx(sum(mine), abs=1e-12)
        assert float(seq.mean(x)[i]) == pytest.approx(sum(mine) / len(mine) if mine else 0.0, abs=1e-12)
