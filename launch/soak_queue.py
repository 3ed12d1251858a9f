"""`headrace soak queue --seeds N`: kill everything at random, cut the power, spoil the network; then audit.

For each seed a small run with real processes. The conductor kills (SIGKILL) and stops (SIGSTOP) them at random, the
server and the network included, leaves torn records in the journal, and starts again what died. A learner restarts
from its checkpoint. When the learner is done, the auditor reads the journal and the learner's log.

Now and then the power fails: all die at once, and what nobody has synced is gone.

    {"seeds": 200, "kills": 3120, "cuts": 190, "groups": 9600, "lost": 0, "duplicated": 0, ...}   exit 1 unless it is so
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launch.soak_faults import SABOTAGE, believe_everything, tear
from launch.soak_power import cut_log, cut_power
from launch.soak_roles import BAD_WEATHER, BEAT_S, DOUBLE_WEATHER, Plan, role
from rollout import journal_segments
from rollout.audit import audit
from rollout.errors import DeadlineError, HeadraceError
from rollout.ledger_states import LedgerSettings
from rollout.queue_client import QueueClient
from rollout.queue_proxy import Weather

ROLES = ("server", "network", "producer-0", "producer-1", "scorer-0", "scorer-1", "learner", "rank-1")
AIMS = {  # whom to attack most, so that a missing protection shows soon
    "fsync": ("server",) * 4,
    "placed": ("server",) * 2,
    "crc": ("server",) * 6,
    "leases": ("producer-0", "producer-1") * 3,
    "idempotency": (),
}
CUTS = {"fsync": 0.3, "placed": 0.4}  # share of attacks that are power cuts; 0.05 where nobody aims
FAULTS = ("kills", "stops", "torn", "cuts", "bytes_taken_back")
WRONGS = (
    "lost",
    "duplicated",
    "corrupt",
    "damaged",
    "replayed_differently",
    "too_stale",
    "not_conserved",
    "unfinished",
    "steps_missing",
)


class Seed:
    """One run under attack."""

    def __init__(
        self, folder: Path, seed: int, sabotage: str, aim: str, steps: int, attack_s: float, peace_s: float
    ) -> None:
        self.rng = random.Random(seed)
        self.targets = (*ROLES, "server", "learner", *AIMS.get(aim, ()))
        self.cut_share = CUTS.get(aim, 0.05)
        self.torn_share, self.tear_below = (1.0, 0.5) if aim == "crc" else (0.5, 1.0)
        weather = DOUBLE_WEATHER if aim == "idempotency" else BAD_WEATHER if seed % 3 else Weather()
        settings = LedgerSettings(
            groups_per_step=self.rng.choice([2, 4]), group_size=2, bound=self.rng.choice([0, 1, 2]),
            mode=self.rng.choice(["wait", "drop"]), max_steps=steps, lease_s=1.0, group_deadline_s=60.0,
            max_attempts=50, min_viable=1,
        )  # fmt: skip
        self.plan = Plan(str(folder), settings, sabotage, weather)
        self.peace = time.monotonic() + attack_s
        self.deadline = self.peace + peace_s
        self.processes: dict[str, Any] = {}
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["launch.soak_roles"])
        self.faults = dict.fromkeys(FAULTS, 0)
        self.unbalanced = self.looks = 0
        self.payload_files: set[str] = set()  # seen so far: clients have placed groups there

    def run(self) -> dict[str, int]:
        """Attack until the learner is done, or the time is over; what is left in peace then must end by itself."""
        watcher = QueueClient(self.plan.server, "watcher", patience_s=0.5, beat_s=BEAT_S)
        try:
            while not self.plan.path("done").exists() and time.monotonic() < self.deadline:
                self._keep_alive()
                self._look(watcher)
                if time.monotonic() < self.peace:
                    self._attack()
                else:
                    time.sleep(0.2)
        finally:
            watcher.close()
            self._end_all()
        return self._result()

    def _keep_alive(self) -> None:
        for name in ROLES:
            process = self.processes.get(name)
            if process is None or (not process.is_alive() and not (process.exitcode == 0 and name != "server")):
                self.processes[name] = self.context.Process(target=role, args=(self.plan, name), daemon=True)
                self.processes[name].start()

    def _look(self, watcher: QueueClient) -> None:
        """Conservation, asked of the server itself, at whatever moment this is."""
        self.payload_files.update(p.name for p in self.plan.path("journal").glob("*.payload"))
        try:
            stats = watcher.stats()
        except (DeadlineError, HeadraceError):
            return
        self.looks += 1
        self.unbalanced += not stats["conserved"]

    def _attack(self) -> None:
        time.sleep(self.rng.random() * 0.25)
        if self.rng.random() < self.cut_share:
            self._cut_power()
            return
        name = self.rng.choice(self.targets)
        process = self.processes[name]
        if not process.is_alive():
            return
        if self.rng.random() < 0.3:
            self.faults["stops"] += 1
            with contextlib.suppress(ProcessLookupError):  # it may end in the same moment
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(self.rng.choice([0.1, 0.4, 1.3]))
                os.kill(process.pid, signal.SIGCONT)
            return
        self.faults["kills"] += 1
        process.kill()
        process.join()
        torn = name == "server" and self.rng.random() < self.torn_share
        if torn and list(self.plan.path("journal").glob("*.segment")):
            self.faults["torn"] += 1
            tear(self.plan.path("journal"), self.rng.random() * self.tear_below)

    def _cut_power(self) -> None:
        self.faults["cuts"] += 1
        self._end_all()
        if self.plan.path("durable").exists():
            durable = self.plan.path("durable")
            self.faults["bytes_taken_back"] += cut_power(self.plan.path("journal"), durable, self.rng)
            self.faults["bytes_taken_back"] += cut_log(self.plan.path("trained.jsonl"), durable, self.rng)
        self._keep_alive()
        time.sleep(self.rng.random())  # a machine that loses power while it boots proves little

    def _end_all(self) -> None:
        """All at the same moment, as far as a signal can."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.join()

    def _result(self) -> dict[str, int]:
        report = audit(self.plan.path("journal"), self.plan.path("trained.jsonl"))
        corrupt = self.plan.path("corrupt")
        finished = self.plan.path("done").exists()
        wrongs = {
            "lost": len(report.lost) + (report.in_flight if not finished else 0),
            "duplicated": len(report.duplicated),
            "corrupt": len(set(corrupt.read_text().split())) if corrupt.exists() else 0,
            "damaged": report.dropped.get("journal_damaged", 0),
            "replayed_differently": len(report.replayed_differently),
            "too_stale": int(report.max_staleness > self.plan.settings.bound),
            "not_conserved": self.unbalanced + (not report.conserved),
            "unfinished": int(not finished),
            "steps_missing": (self.plan.settings.max_steps or 0) - self.plan.number("done") if finished else 0,
        }
        rest = {"groups": report.issued, "trained": report.trained, "looks": self.looks}
        rest["payload_files"] = len(self.payload_files)
        return {**self.faults, **rest, "dropped": sum(report.dropped.values()), **wrongs}


def soak_queue(
    seeds: Sequence[int], sabotage: str, steps: int, attack_s: float, peace_s: float, keep: Path | None, aim: str
) -> dict[str, Any]:
    """Run the seeds one after the other; the sum of what happened.

    `sabotage` takes one protection away (SABOTAGE); `aim` attacks mostly where that protection stands. Each run is
    attacked for `attack_s` at most, and then left in peace for `peace_s`: on a busy machine it may need that.
    """
    total: dict[str, Any] = {"seeds": 0, "sabotage": sabotage or None, "bad_seeds": []}
    started = time.monotonic()
    with _sabotaged(sabotage):
        for seed in seeds:
            folder = Path(tempfile.mkdtemp(prefix="headrace-soak-"))
            result = Seed(folder, seed, sabotage, aim or sabotage, steps, attack_s, peace_s).run()
            total["seeds"] += 1
            for key, value in result.items():
                total[key] = total.get(key, 0) + value
            if any(result[w] for w in WRONGS):
                total["bad_seeds"].append(seed)
                if keep:
                    shutil.copytree(folder, keep / f"seed-{seed}", ignore=shutil.ignore_patterns("*.sock"))
            shutil.rmtree(folder)
    total["seconds"] = round(time.monotonic() - started, 1)
    return total


@contextlib.contextmanager
def _sabotaged(sabotage: str) -> Iterator[None]:
    """The auditor must read what a server without checksums wrote."""
    if sabotage and sabotage not in SABOTAGE:
        raise ValueError(f"unknown sabotage {sabotage!r}; there are {', '.join(SABOTAGE)}")
    honest = journal_segments.checksum
    if sabotage == "crc":
        believe_everything()
    try:
        yield
    finally:
        journal_segments.checksum = honest


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace soak queue", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run")
    parser.add_argument(
        "--attack", type=float, default=90.0, metavar="S", help="seconds of attack on each run, at most"
    )
    parser.add_argument("--peace", type=float, default=240.0, metavar="S", help="seconds in peace to end, at most")
    parser.add_argument("--sabotage", choices=SABOTAGE, default="", help="take one protection away: the soak must fail")
    parser.add_argument("--aim", choices=SABOTAGE, default="", help="attack mostly where that protection stands")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep the files of seeds that went wrong")
    options = parser.parse_args(argv)
    seeds = range(options.first, options.first + options.seeds)
    total = soak_queue(seeds, options.sabotage, options.steps, options.attack, options.peace, options.keep, options.aim)
    print(json.dumps(total))
    return int(bool(total["bad_seeds"]))


if __name__ == "__main__":
    sys.exit(main())
