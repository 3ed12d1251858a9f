"""What happens when something fails in the weight plane: every fault, on light engines in processes of their own.

    headrace bench weight_faults --json faults.json

Two engines, "healthy" and "victim", generate all the time with weights under which every token is the version that
made it. Version 1 arrives well; then the fault strikes version 2. A case holds if

    no answer left either engine, then or later, with a token that anything but proven and confirmed weights made,
    the fault was named in an event or by an error,
    within the deadline the healthy engine serves version 2 (sent again), or, if the learner itself is at fault or dead,
    everybody still serves version 1 and the next learner's version 3 arrives.

`tests/actors/test_weight_faults.py` runs all of it and holds the table in docs/weights.md against what it saw.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.light_process import Doom
from benchmarks.weight_fault_table import AGAIN, ALARM, KEPT, OUT, cases
from benchmarks.weight_scene import TIMEOUT_S, Case, Scene, V
from rollout.engine import SamplingParams
from rollout.errors import HeadraceError

OUTLIVES_S = 0.1  # a dozen answers' worth of time for a wrong one to get out


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of one case; `wrong` says why it does not hold, "" if it does."""

    plane: str
    fault: str
    named: str
    ended: str
    seconds: float
    wrong: str


class Watcher:
    """Asks an engine all the time, also while answers are held; remembers the first that should not have left it.

    A token must be the version that it is stamped with. An engine that loads wrongly whatever it gets may hand out
    nothing but version 0, even where its tokens happen to look right (`loads_wrong`).
    """

    def __init__(self, name: str, engine: Any, loads_wrong: bool = False) -> None:
        self._name, self._engine, self._loads_wrong = name, engine, loads_wrong
        self.wrong, self.tokens, self.newest = "", 0, -1
        self._open: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        for k in itertools.count():
            question = asyncio.create_task(self._question(k))
            self._open.add(question)
            question.add_done_callback(self._open.discard)
            await asyncio.wait([question], timeout=0.05)  # one that is held stays open, and is looked at if it comes
            await asyncio.sleep(0.005)

    async def _question(self, k: int) -> None:
        try:
            (answer,) = await self._engine.answer(f"w{k}", [1], SamplingParams(8, temperature=0.0), 1)
        except (HeadraceError, ConnectionError):
            return  # killed or condemned: nothing left it
        for span in answer.versions:
            for token in answer.token_ids[span.start : span.end].tolist():
                if token != span.version % V or (self._loads_wrong and span.version > 0):
                    self.wrong = self.wrong or f"{self._name} handed out {token} as version {span.version}"
            self.newest = max(self.newest, span.version)
        self.tokens += len(answer.token_ids)

    async def end(self) -> None:
        asked = [self._task, *self._open]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def run_case(case: Case) -> Seen:
    """Version 1 well, the fault in version 2, and what is served afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        scene = Scene(case, Path(scratch))
        await scene.ready()
        loads_wrong = "on_load" in case.settings
        watchers = {n: Watcher(n, e, loads_wrong and n == "victim") for n, e in scene.engines.items()}
        try:
            return await _play(case, scene, watchers)
        finally:
            for watcher in watchers.values():
                await watcher.end()
            await scene.close()


async def _play(case: Case, scene: Scene, watchers: Mapping[str, Watcher]) -> Seen:
    errors: list[str] = []
    early = (case.victim or case.learner or Doom("")).step in ("join", "enter")
    if not early and "takes" not in case.settings and "on_load" not in case.settings:
        await scene.push(1)
    case.inject(scene)
    began = time.monotonic()
    try:
        await scene.push(2)
    except Exception as error:  # noqa: BLE001 - whatever ends a push is the row's answer
        errors.append(f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - began
    ended = _ending(scene, errors)
    if ended in (KEPT, ALARM):
        await asyncio.sleep(OUTLIVES_S)
        newest = max(w.newest for w in watchers.values())
        assert newest <= 1, f"version {newest} left an engine before anybody confirmed it"
    if ended == KEPT:
        scene.next_learner()
        await scene.push(3)
    if ended != ALARM:
        await _served(watchers["healthy"], 3 if ended == KEPT else 2)
    named = _named(case, scene, errors)
    wrong = "; ".join(w.wrong for w in watchers.values() if w.wrong)
    wrong = wrong or ("" if named else f"not named: {[k for k, _ in scene.events]} {errors}")
    wrong = wrong or ("" if ended == case.ends else f"ended with {ended!r}, expected {case.ends!r}")
    assert watchers["healthy"].tokens > 0
    return Seen(case.plane, case.fault, named or "-", ended, round(seconds, 2), wrong)


def _ending(scene: Scene, errors: list[str]) -> str:
    kinds = [k for k, _ in scene.events]
    if kinds.count("canary_alarm") == len(scene.engines):
        return ALARM  # every engine disagrees with the learner: it is the learner that is wrong
    if errors:
        return KEPT
    return OUT if "engine_quarantined" in kinds else AGAIN


def _named(case: Case, scene: Scene, errors: list[str]) -> str:
    if case.named_by == "error":
        return errors[0].split(":")[0] if errors else ""
    kinds = {k for k, _ in scene.events}
    return next((k for k in case.named_by.split("|") if k in kinds), "")


async def _served(watcher: Watcher, version: int) -> None:
    """Wait until the healthy engine hands out `version`; TimeoutError if it does not within the deadline."""
    async with asyncio.timeout(3 * TIMEOUT_S):
        while watcher.newest != version:  # noqa: ASYNC110 - what we wait for is in another process
            await asyncio.sleep(0.01)


def table(seen: Sequence[Seen]) -> str:
    """The table of docs/weights.md: no timings, so that it is the same on every machine."""
    lines = ["| plane | fault | named by | ends with |", "|---|---|---|---|"]
    lines += [f"| {s.plane} | {s.fault} | {s.named} | {s.ended} |" for s in seen]
    return "\n".join(lines)


async def run_all(chosen: Sequence[Case], tell: Callable[[str], None] = lambda line: None) -> list[Seen]:
    seen = []
    for case in chosen:
        started = time.monotonic()
        try:
            seen.append(await run_case(case))
        except (HeadraceError, TimeoutError, ConnectionError) as error:
            wrong = f"{type(error).__name__}: {error}"
            seen.append(Seen(case.plane, case.fault, "-", "not at all", round(time.monotonic() - started, 2), wrong))
        s = seen[-1]
        tell(f"{time.monotonic() - started:5.1f} s  {s.plane:5}  {s.fault}: {s.named}, {s.ended}  {s.wrong}")
    return seen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace bench weight_faults", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write one JSON object to this file")
    parser.add_argument("--only", default="", help="run the rows whose name contains this")
    args = parser.parse_args(argv)
    chosen = [c for c in cases() if args.only in f"{c.plane} {c.fault}"]
    seen = asyncio.run(run_all(chosen, lambda line: print(line, flush=True)))
    print(table(seen))
    if args.json:
        args.json.write_text(json.dumps({"faults": [asdict(s) for s in seen], "held": not any(s.wrong for s in seen)}))
    return 1 if any(s.wrong for s in seen) else 0


if __name__ == "__main__":
    raise SystemExit(main())
