"""Proves that every metric of the contract has a row, that names with open parts find theirs, and that what Prometheus
scrapes over HTTP is what the run said last, on a port that was free."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from rollout.errors import ConfigError
from rollout.metrics import METRICS, Exporter, find, gauge_samples, metric_samples, unregistered

CONTRACT = """
step version time_s reward/mean reward/std reward/exact groups/trained groups/dropped length/mean length/truncated
loss/total loss/policy loss/kl policy/entropy policy/clip_fraction policy/ratio_mean policy/kl_behaviour grad_norm lr
staleness/mean staleness/max tokens/trained throughput/rollout_tokens_per_s throughput/learner_tokens_per_s
idle/learner idle/rollout time/wait time/train time/weight_sync weights/stall_s ledger/lost ledger/duplicated
eval/held_out/reward
"""


def test_every_key_of_the_contract_has_a_row() -> None:
    assert unregistered(CONTRACT.split()) == []
    assert unregistered(["reward/mean", "rewards/mean", "loss"]) == ["loss", "rewards/mean"]


def test_exact_rows_win_over_open_ones_and_no_name_stands_twice() -> None:
    assert find("reward/mean").name == "reward/mean"  # type: ignore[union-attr]
    assert find("reward/exact").name == "reward/<component>"  # type: ignore[union-attr]
    assert find("eval/held_out/reward").name == "eval/<name>/reward"  # type: ignore[union-attr]
    assert find("reward/a/b") is None
    names = [m.name for m in METRICS]
    assert len(names) == len(set(names)) and all(m.meaning for m in METRICS)


def test_open_parts_become_labels() -> None:
    samples = {
        (s.name, tuple(s.labels.items())): s.value
        for s in metric_samples({"reward/mean": 0.5, "reward/exact": 1, "x": "y"})
    }
    assert samples == {
        ("headrace_reward_mean", ()): 0.5,
        ("headrace_reward_by_component", (("component", "exact"),)): 1.0,
    }


def test_gauges_of_roles_and_counts_by_state_become_labels() -> None:
    gauges = {
        "roles": {"rollout-0": {"groups_in_flight": 7, "phase": "run"}},
        "queue": {"bytes": 9, "states": {"leased": 2}},
    }
    samples = {(s.name, tuple(s.labels.items())): s.value for s in gauge_samples(gauges)}
    assert samples == {
        ("headrace_role_groups_in_flight", (("role", "rollout-0"),)): 7.0,
        ("headrace_queue_bytes", ()): 9.0,
        ("headrace_queue_states", (("of", "leased"),)): 2.0,
    }


def test_a_scrape_shows_the_last_values() -> None:
    exporter = Exporter(0)
    port = exporter.start()
    try:
        exporter.metrics({"reward/mean": 0.25})
        exporter.metrics({"reward/mean": 0.75, "reward/exact": 0.5})
        exporter.gauges({"roles": {"learner-0": {"step": 3}}})
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    finally:
        exporter.close()
    assert "headrace_reward_mean 0.75" in text and "0.25" not in text
    assert 'headrace_reward_by_component{component="exact"} 0.5' in text
    assert 'headrace_role_step{role="learner-0"} 3.0' in text
    assert "# HELP headrace_reward_mean mean reward of the answers trained on" in text


def test_a_taken_port_is_the_users_error_and_names_the_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"observe.prometheus_port: {port}: cannot be bound .*use 0"):
            Exporter(port).start()
