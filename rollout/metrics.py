"""Every metric name, its unit and its meaning, one row each; and the Prometheus exporter that serves them.

A new metric is one row here and one key in a metrics line (or in some `gauges()`). `<name>` in a row stands for any
one part: reward/<component> is also reward/exact.

    Exporter(port=0).start() -> 41873          # 0: any free port; the driver publishes it in <run dir>/prometheus.json
    exporter.metrics({"reward/mean": 0.5})     # headrace_reward_mean 0.5
    exporter.gauges({"roles": {"r-0": {"waiting_s": 7}}})   # headrace_role_waiting_s{role="r-0"} 7
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rollout.errors import ConfigError


class Metric(NamedTuple):
    """Metric("grad_norm", "", "norm of the gradient before clipping")."""

    name: str
    unit: str
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("step", "steps", "optimizer steps done, this one included"),
    Metric("version", "versions", "weight version that this step made"),
    Metric("time_s", "s", "wall clock when the step was complete (seconds since 1970)"),
    # what is learnt
    Metric("reward/mean", "", "mean reward of the answers trained on"),
    Metric("reward/std", "", "standard deviation of these rewards"),
    Metric("reward/<component>", "", "mean of one component of the reward"),
    Metric("eval/<name>/reward", "", "mean reward of greedy answers to the held-out prompts"),
    Metric("groups/trained", "groups", "groups consumed by this step"),
    Metric("groups/dropped", "groups", "groups dropped so far, for any reason"),
    Metric("groups/<reason>", "groups", "groups left out of this step for one reason"),
    Metric("answers/<kind>", "answers", "answers of this step that are empty, unscored, ..."),
    Metric("length/mean", "tokens", "mean length of the answers trained on"),
    Metric("length/truncated", "fraction", "answers that ran out of tokens"),
    # the update
    Metric("loss/total", "", "what was minimised"),
    Metric("loss/policy", "", "the policy part of it"),
    Metric("loss/kl", "", "the KL part of it"),
    Metric("loss/<part>", "", "another part of the loss"),
    Metric("policy/entropy", "nats", "mean entropy of the next-token distribution"),
    Metric("policy/clip_fraction", "fraction", "tokens whose ratio was clipped"),
    Metric("policy/ratio_mean", "", "mean ratio of the current to the proximal policy"),
    Metric("policy/kl_behaviour", "nats", "KL of the proximal policy to the one that sampled (k3)"),
    Metric("policy/<statistic>", "", "another statistic of the policy update"),
    Metric("correction/<statistic>", "", "the off-policy correction: effective sample size, weights, mismatch"),
    Metric("preference/<statistic>", "", "learning from pairs: margin, accuracy, rewards of chosen and rejected"),
    Metric("critic/<statistic>", "", "the value function of PPO"),
    Metric("advantage/<statistic>", "", "advantages, and how many groups gave none"),
    Metric("step/skipped", "", "1 where the gradient was not finite and the step changed nothing"),
    Metric("grad_norm", "", "norm of the gradient before clipping"),
    Metric("lr", "", "learning rate of this step"),
    # asynchrony
    Metric("staleness/mean", "versions", "learner version minus version of a group's oldest token, at take"),
    Metric("staleness/max", "versions", "the largest of these; never above staleness.bound"),
    Metric("staleness/<statistic>", "versions", "another statistic of staleness"),
    Metric("tokens/trained", "tokens", "answer tokens with a loss in this step"),
    Metric("tokens/<kind>", "tokens", "another count of tokens in this step"),
    Metric("throughput/rollout_tokens_per_s", "tokens/s", "answer tokens generated, over the time since the last step"),
    Metric("throughput/learner_tokens_per_s", "tokens/s", "answer tokens trained, over the time of the step"),
    Metric("idle/learner", "fraction", "share of the step in which the learner waited for groups"),
    Metric("idle/rollout", "fraction", "share of the step in which engines had nothing in flight"),
    Metric("time/wait", "s", "learner waiting for groups"),
    Metric("time/train", "s", "forward, backward and optimizer"),
    Metric("time/weight_sync", "s", "sending the new weights and having them committed"),
    Metric("time/<part>", "s", "another part of the step"),
    Metric("weights/stall_s", "s", "generation stood still for the commit (worst engine)"),
    Metric("weights/transfer_s", "s", "moving the bytes of a version to the engines"),
    Metric("weights/bytes", "bytes", "bytes of the version that were moved"),
    Metric("weights/held_s", "s", "answers of a new version waited in the engine until the learner confirmed it"),
    Metric("weights/<statistic>", "", "another statistic of the weight plane"),
    Metric("canary/<statistic>", "", "log-probs of fixed tokens, engine against learner"),
    Metric("memory/<role>", "bytes", "resident memory of a role"),
    # the books
    Metric("ledger/lost", "groups", "measured by the audit: neither trained nor dropped with a reason"),
    Metric("ledger/duplicated", "groups", "measured by the audit: trained more than once"),
    Metric("ledger/<statistic>", "groups", "groups in one state, or another count of the ledger"),
)

_EXACT = {m.name: m for m in METRICS if "<" not in m.name}
_PATTERNS = [(re.compile(re.sub(r"<\w+>", r"([^/]+)", m.name)), m) for m in METRICS if "<" in m.name]


def find(name: str) -> Metric | None:
    """The row that a metric's name belongs to: find("reward/exact").name == "reward/<component>"."""
    if name in _EXACT:
        return _EXACT[name]
    return next((m for pattern, m in _PATTERNS if pattern.fullmatch(name)), None)


def unregistered(names: Iterable[str]) -> list[str]:
    """Names without a row, for tests and for a warning; a metrics line should have none."""
    return sorted(name for name in names if find(name) is None)


class Sample(NamedTuple):
    """One number for Prometheus: Sample("headrace_reward", {"component": "exact"}, 0.5, "mean of one component")."""

    name: str
    labels: dict[str, str]
    value: float
    meaning: str


def metric_samples(row: Mapping[str, Any]) -> Iterator[Sample]:
    """A metrics line as samples; parts that a row leaves open become labels."""
    for name, value in row.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        metric = find(name)
        if metric is None or "<" not in metric.name:
            yield Sample(_prometheus(name), {}, float(value), metric.meaning if metric else name)
            continue
        label = re.findall(r"<(\w+)>", metric.name)[0]
        match = re.fullmatch(re.sub(r"<\w+>", r"([^/]+)", metric.name), name)
        stem = re.sub(r"/?<\w+>", "", metric.name)
        yield Sample(
            _prometheus(f"{stem}/by_{label}"), {label: match[1] if match else ""}, float(value), metric.meaning
        )


def gauge_samples(gauges: Mapping[str, Any]) -> Iterator[Sample]:
    """gauges.json as samples: roles become a label, a mapping inside (counts by state) becomes a label `of`."""
    for role, values in dict(gauges.get("roles", {})).items():
        yield from _flat("headrace_role", values, {"role": str(role)})
    yield from _flat("headrace_queue", gauges.get("queue", {}), {})


def _flat(stem: str, values: Mapping[str, Any], labels: dict[str, str]) -> Iterator[Sample]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from (Sample(f"{s.name}", s.labels, s.value, key) for s in _labelled(stem, key, value, labels))
        elif isinstance(value, int | float):
            yield Sample(f"{stem}_{_word(key)}", labels, float(value), key)


def _labelled(stem: str, key: str, values: Mapping[str, Any], labels: dict[str, str]) -> Iterator[Sample]:
    for of, value in values.items():
        if isinstance(value, int | float):
            yield Sample(f"{stem}_{_word(key)}", {**labels, "of": str(of)}, float(value), key)


def _prometheus(name: str) -> str:
    return f"headrace_{_word(name)}"


def _word(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


class Exporter:
    """Serves the last metrics line and the last gauges to Prometheus, on a thread of its own."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._wanted, self._host = port, host
        self._lock = threading.Lock()
        self._samples: dict[str, list[Sample]] = {}
        self._server: Any = None

    def start(self) -> int:
        """Bind and serve; returns the port that was bound. Raises ConfigError when it is taken."""
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(self._wanted, addr=self._host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"observe.prometheus_port: {self._wanted}: cannot be bound ({error.strerror}); use 0 for any free port"
            ) from None
        return int(self._server.server_port)

    def metrics(self, row: Mapping[str, Any]) -> None:
        with self._lock:
            self._samples["metrics"] = list(metric_samples(row))

    def gauges(self, gauges: Mapping[str, Any]) -> None:
        with self._lock:
            self._samples["gauges"] = list(gauge_samples(gauges))

    def collect(self) -> Iterator[Any]:
        """Called by Prometheus' client for every scrape."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            samples = [s for part in self._samples.values() for s in part]
        families: dict[str, Any] = {}
        for sample in samples:
            names = sorted(sample.labels)
            family = families.setdefault(sample.name, GaugeMetricFamily(sample.name, sample.meaning, labels=names))
            family.add_metric([sample.labels[n] for n in names], sample.value)
        yield from families.values()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
