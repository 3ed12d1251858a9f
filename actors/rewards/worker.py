"""A reward's own process: `python -m actors.rewards.worker`. Started by process.py, never by hand.

    in   {"kind": "verifier", "name": "exact", ...}                            once: what to load, and its limits
    out  {"ready": true}  or  {"failed": "raised", "detail": "..."}
    in   {"id": 7, "prompt": "...", "answer": "...", "meta": {...}}            one at a time
    out  {"id": 7, "value": 1.0}  or  {"id": 7, "failed": "nan", "detail": "", "retire": "memory"}

Jobs come on what was standard input and answers leave on what was standard output; a reward that prints writes to the
log instead. A thread watches the input: when the owner is gone, the process goes, and takes along what it had forked.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from actors.rewards.components import LoadError, Reward, load
from actors.rewards.descendants import adopt_orphans, descendants, kill_family

RETIRE_CHILDREN = 32  # left behind by the reward; zombies among them only go when we do
RETIRE_MEMORY = 0.5  # of memory_mb resident: a leak ends the process between two samples, not inside one


def main() -> None:
    jobs, answers = _private_pipes()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that started us in the background ignores it
    adopt_orphans()
    todo: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs, todo), daemon=True).start()
    spec = todo.get()
    _limit(spec["memory_mb"])
    reply, reward = _load(spec)
    _say(answers, reply)
    me = os.getpid()
    while reward is not None:
        job = todo.get()
        # Backstop for C code that never lets the watching thread run after our owner was killed: the kernel ends us.
        signal.setitimer(signal.ITIMER_PROF, 2 * spec["deadline_s"] + 5)
        reply = _judge(reward, job)
        if os.getpid() != me:
            os._exit(0)  # a child that the reward forked and that returned: it has nothing to say
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply["id"] = job["id"]
        retire = "memory" if reply.get("failed") == "out_of_memory" else _why_retire(spec["memory_mb"])
        if retire:
            reply["retire"] = retire
        _say(answers, reply)


def _load(spec: dict[str, Any]) -> tuple[dict[str, Any], Reward | None]:
    try:
        return {"ready": True}, load(spec["kind"], spec["name"], spec["path"], spec["args"])
    except LoadError as error:
        return {"failed": "unloadable", "detail": str(error)}, None
    except BaseException as error:  # noqa: BLE001 - whatever the user's module does on import becomes a message
        return {"failed": "raised", "detail": _describe(error)}, None


def _judge(reward: Reward, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return _as_number(reward(job["prompt"], job["answer"], job["meta"]))
    except MemoryError:
        return {"failed": "out_of_memory", "detail": "the reward passed memory_mb"}
    except SystemExit as error:
        return {"failed": "exited", "detail": f"the reward called exit({error.code!r})"}
    except BaseException as error:  # noqa: BLE001 - one sample's failure, whatever the reward raised
        return {"failed": "raised", "detail": _describe(error)}


def _as_number(value: Any) -> dict[str, Any]:
    if value is None:
        return {"failed": "none", "detail": "the reward returned None; it must return a number"}
    if getattr(value, "shape", None) == ():
        value = value.item()  # a numpy scalar or a tensor of one element
    if not isinstance(value, numbers.Real):
        return {"failed": "not_a_number", "detail": f"the reward returned {type(value).__name__} {value!r:.60}"}
    number = float(value)
    if math.isnan(number):
        return {"failed": "nan", "detail": "the reward returned NaN"}
    if math.isinf(number):
        return {"failed": "infinite", "detail": f"the reward returned {number}"}
    return {"value": number}


def _describe(error: BaseException) -> str:
    """ "ZeroDivisionError: division by zero (my_rewards.py:12)"."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    try:
        said = " ".join(str(error).split())[:300]
    except Exception:  # noqa: BLE001 - the user's own exception cannot even be printed
        said = "(its message cannot be printed)"
    return f"{type(error).__name__}: {said}{where}"


def _why_retire(memory_mb: int) -> str | None:
    if len(descendants(os.getpid())) > RETIRE_CHILDREN:
        return "children"
    return "memory" if _resident_mb() > RETIRE_MEMORY * memory_mb else None


def _resident_mb() -> float:
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize() / (1 << 20)
    except OSError:  # no /proc: the peak is the next best thing
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _limit(memory_mb: int) -> None:
    # Data, not address space: shared libraries and reserved but untouched ranges are not what a leak fills.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _private_pipes() -> tuple[BinaryIO, int]:
    """Move the two pipes out of the reward's reach: its input is empty, and its prints go to the log."""
    jobs, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return os.fdopen(jobs, "rb"), answers


def _read(jobs: BinaryIO, todo: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in jobs:
        todo.put(json.loads(line))
    kill_family(os.getpid())


def _say(answers: int, reply: dict[str, Any]) -> None:
    sys.stdout.flush()
    line = json.dumps(reply).encode() + b"\n"
    while line:
        line = line[os.write(answers, line) :]


if __name__ == "__main__":
    main()
