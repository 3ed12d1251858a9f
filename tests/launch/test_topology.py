"""Proves that placement is solved before anything starts: every process gets its cores and GPUs, none twice, and
a run that does not fit is refused with what is missing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.config import RunConfig, from_data
from launch.inventory import Host, Inventory
from launch.topology import Placement, solve
from rollout.errors import ConfigError

TWO_CORES = Inventory((Host("box", (0, 1), 0, 16.0),))
NODE = Host("a", tuple(range(32)), 8, 512.0)


def topology(rollout: dict[str, Any], learner: dict[str, Any], reward: dict[str, Any] | None = None) -> RunConfig:
    return from_data(
        {
            "model": {"path": "m"},
            "prompts": {"path": "p.jsonl", "held_out": 8},
            "rewards": [{"name": "exact"}],
            "algorithm": {"groups_per_step": 64},
            "topology": {"rollout": rollout, "learner": learner, "reward": reward or {}},
        }
    )


def seats(placements: tuple[Placement, ...]) -> dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return {p.name: (p.host, p.cores, p.gpus) for p in placements}


def test_two_cores_go_to_the_engine_and_the_learner_and_the_rest_shares_with_the_engine() -> None:
    placed = solve(topology({}, {}), TWO_CORES)
    assert seats(placed) == {
        "learner-0": ("box", (1,), ()),
        "rollout-0": ("box", (0,), ()),
        "reward-0": ("box", (0,), ()),
        "queue": ("box", (0,), ()),
    }
    assert [p.shares_with for p in placed] == [None, None, "rollout-0", "rollout-0"]


def test_rewards_get_their_own_cores_where_some_are_left() -> None:
    placed = solve(topology({}, {}, {"replicas": 2, "cpus": 1}), Inventory((Host("box", tuple(range(5))),)))
    assert seats(placed) == {
        "learner-0": ("box", (4,), ()),
        "rollout-0": ("box", (0,), ()),
        "reward-0": ("box", (1,), ()),
        "reward-1": ("box", (2,), ()),
        "queue": ("box", (3,), ()),
    }


def test_tensor_parallel_engines_and_ranks_on_one_node() -> None:
    placed = seats(solve(topology({"replicas": 2, "gpus": 2, "cpus": 4}, {"ranks": 4, "gpus": 1}), Inventory((NODE,))))
    assert [placed[f"rollout-{n}"][2] for n in range(2)] == [(0, 1), (2, 3)]
    assert [placed[f"learner-{n}"][2] for n in range(4)] == [(4,), (5,), (6,), (7,)]


def test_ranks_stay_on_one_host_and_large_engines_find_the_other() -> None:
    hosts = Inventory((Host("a", tuple(range(16)), 4), Host("b", tuple(range(16)), 4)))
    placed = seats(solve(topology({"replicas": 1, "gpus": 4, "cpus": 4}, {"ranks": 4, "gpus": 1}), hosts))
    assert len({placed[f"learner-{n}"][0] for n in range(4)}) == 1
    assert placed["rollout-0"][0] != placed["learner-0"][0]


def test_engine_and_learner_share_one_gpu() -> None:
    placed = solve(topology({"gpus": 0.5}, {"gpus": 0.5}), Inventory((Host("a", (0, 1, 2), 1),)))
    assert [(p.gpus, p.gpu_share) for p in placed[:2]] == [((0,), 0.5), ((0,), 0.5)]


def test_what_shares_a_gpu_goes_where_both_have_room() -> None:
    config = topology({"gpus": 0.5}, {"gpus": 0.5})
    narrow, wide = Host("narrow", (0,), 1), Host("wide", (0, 1, 2, 3), 2)
    placed = seats(solve(config, Inventory((narrow, wide))))
    assert (placed["learner-0"][::2], placed["rollout-0"][::2]) == (("wide", (0,)), ("wide", (0,)))
    with pytest.raises(ConfigError) as caught:
        solve(config, Inventory((narrow, Host("other", (0,), 1))))
    assert str(caught.value) == (
        "weights.plane: ipc: needs learner and engine on one GPU, here learner-0 on narrow GPU 0, rollout-0 on other "
        "GPU 0; ask for fewer topology.learner.cpus or topology.rollout.cpus, or set weights.plane to gloo"
    )


def test_two_ranks_share_one_core_beside_an_engine() -> None:
    placed = solve(topology({}, {"ranks": 2, "cpus": 0.5}), TWO_CORES)
    assert [(p.name, p.cores, p.core_share, p.threads) for p in placed[:3]] == [
        ("learner-0", (1,), 0.5, 1),
        ("learner-1", (1,), 0.5, 1),
        ("rollout-0", (0,), 1.0, 1),
    ]


@pytest.mark.parametrize(
    ("rollout", "learner", "inventory", "expected"),
    [
        (
            {"cpus": 2},
            {},
            TWO_CORES,
            "topology.learner: needs 1 learner rank x 1 core + 1 engine x 2 cores; this host has 2 cores: 1 core is "
            "missing; lower topology.rollout.replicas or .cpus, or topology.learner.ranks or .cpus",
        ),
        (
            {"gpus": 1},
            {"gpus": 1},
            TWO_CORES,
            "topology.learner: needs 1 learner rank x 1 core and 1 GPU + 1 engine x 1 core and 1 GPU; this host has 2 "
            "cores: 2 GPUs are missing; to run on CPU set topology.rollout.gpus=0 and topology.learner.gpus=0",
        ),
        (
            {"gpus": 4, "replicas": 1},
            {},
            Inventory((Host("a", (0, 1), 2), Host("b", (0, 1), 2))),
            "topology.rollout: needs 1 learner rank x 1 core + 1 engine x 1 core and 4 GPUs; the 2 hosts have 4 cores "
            "and 4 GPUs: no single host has 1 core and 4 GPUs left for rollout-0; lower topology.rollout.cpus or "
            "topology.rollout.gpus, or use fewer, smaller processes",
        ),
    ],
)
def test_a_run_that_does_not_fit_names_what_is_missing(
    rollout: dict[str, Any], learner: dict[str, Any], inventory: Inventory, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        solve(topology(rollout, learner), inventory)
    assert str(caught.value) == expected


@settings(max_examples=200, deadline=None)
@given(
    hosts=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=3),
    replicas=st.integers(1, 4),
    ranks=st.integers(1, 4),
    cpus=st.sampled_from([0.25, 0.5, 1, 2, 3]),
    learner_cpus=st.sampled_from([0.5, 0.75, 1]),
    gpus=st.sampled_from([0, 0.5, 1, 2]),
    learner_gpus=st.sampled_from([0, 0.5, 1]),
)
def test_nothing_is_ever_given_twice(
    hosts: list[tuple[int, int]],
    replicas: int,
    ranks: int,
    cpus: float,
    learner_cpus: float,
    gpus: float,
    learner_gpus: float,
) -> None:
    inventory = Inventory(tuple(Host(f"h{n}", tuple(range(c)), g) for n, (c, g) in enumerate(hosts)))
    learner = {"ranks": ranks, "gpus": learner_gpus, "cpus": learner_cpus}
    config = topology({"replicas": replicas, "cpus": cpus, "gpus": gpus}, learner)
    try:
        placed = solve(config, inventory)
    except ConfigError as error:
        assert any(reason in str(error) for reason in ("missing", "no single host", "on one GPU"))
        return
    owned: Counter[tuple[str, int]] = Counter()
    for p in placed:
        if p.role in ("learner", "rollout"):
            owned.update(dict.fromkeys(((p.host, core) for core in p.cores), p.core_share))  # type: ignore[arg-type]
    assert sum(owned.values()) == pytest.approx(replicas * cpus + ranks * learner_cpus)
    assert all(share <= 1 + 1e-6 for share in owned.values())
    shares: Counter[tuple[str, int]] = Counter()
    for p in placed:
        for gpu in p.gpus:
            shares[p.host, gpu] += p.gpu_share  # type: ignore[assignment]
    assert all(share <= 1 + 1e-6 for share in shares.values())
    for p in placed:
        host = next(h for h in inventory.hosts if h.name == p.host)
        assert p.cores and set(p.cores) <= set(host.cores) and all(g < host.gpus for g in p.gpus)
