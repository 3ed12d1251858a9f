"""The table of the fault matrix: what is done to whom in the weight plane, and what must come of it.

    cases() -> rows such as Case("gloo", "bit flip in a bucket", "weights_refused", "sent again", <what does it>)

`benchmarks/weight_faults.py` plays them on the stage of `benchmarks/weight_scene.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.light_engine import DOWN, HEAD, UP, adapter, always
from benchmarks.light_process import Doom
from benchmarks.weight_scene import Case, Scene, V, Weights

AGAIN, OUT, KEPT = "sent again", "victim quarantined", "old version kept, next learner served"
ALARM = "learner stopped"


def cases() -> list[Case]:
    """All rows, in the order of the table."""
    rows = [*_on_the_wire(), *_in_the_store()]
    for plane in ("gloo", "store"):
        rows += [*_of_the_learner(plane), *_deaths(plane)]
    return rows


def _on_the_wire() -> Iterator[Case]:
    yield Case("gloo", "bit flip in a bucket", "weights_refused", AGAIN, on_wire(flip))
    yield Case("gloo", "truncated bucket", "weights_interrupted|weights_refused", AGAIN, on_wire(halve))
    yield Case("gloo", "bucket sent twice, next one lost", "weights_refused", AGAIN, on_wire(repeat_bucket()))
    yield Case("gloo", "buffer reused before it was sent", "weights_refused", AGAIN, on_wire(scribble))
    yield Case("gloo", "stale version in the stream", "weights_refused", AGAIN, on_wire(old_prologue))


def _in_the_store() -> Iterator[Case]:
    damages: list[tuple[str, Callable[[Path], None]]] = [
        ("bit flip in a file", flip_file),
        ("truncated file", cut_file),
        ("file gone", Path.unlink),
        ("stale file under the new name", older_file),
    ]
    for fault, damage in damages:
        yield Case("store", fault, "weights_refused", AGAIN, in_store("v00000002.*tensors", damage))


def _of_the_learner(plane: str) -> Iterator[Case]:
    """It sends something else than it trains, or an engine loads something else than it was sent."""
    beside = source(lambda w: {**w, UP: torch.zeros(V, 4)})
    yield Case(plane, "missing tensor", "error", KEPT, source(lambda w: {}))
    yield Case(plane, "unannounced tensor (base beside the adapter)", "error", KEPT, beside)
    yield Case(plane, "wrong dtype", "error", KEPT, source(lambda w: {HEAD: w[HEAD].bfloat16()}))
    yield Case(plane, "stale weights", "weights_unchanged", KEPT, stale)
    yield Case(plane, "forgotten adapter", "weights_unchanged", KEPT, forgotten_adapter)
    half = "adapter forgotten while the base is trained too"
    yield Case(plane, half, "canary_alarm", ALARM, half_forgotten_adapter)
    yield Case(plane, "learner killed before it confirmed", "error", KEPT, dies_before_it_confirms)
    yield Case(plane, "base sent instead of the adapter", "weights_refused", OUT, settings={"takes": [UP, DOWN]})
    yield Case(plane, "weights loaded transposed", "canary_alarm", OUT, settings={"on_load": transposed})
    yield Case(plane, "weights loaded with a scale of 0.1 %", "canary_alarm", OUT, settings={"on_load": scaled})


def _deaths(plane: str) -> Iterator[Case]:
    """An engine, and then the learner, dies or hangs at each step of the protocol, the nth time it comes there."""
    engine = {"stage": 2, "commit": 2, "committed": 2, "score": 2, "confirm": 2}
    learner = {"announce": 2, "gather": 3, "sent": 2}
    if plane == "gloo":
        engine = {"join": 1, "stage": 2, "bucket": 24, **engine}
        learner = {"enter": 1, "announce": 2, "send": 2, "bucket": 24, "sent": 2}
    for signalled, word in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped")):
        for step, nth in engine.items():
            doom = Doom(step, nth, signalled)
            yield Case(plane, f"engine {word} at {step}", "engine_quarantined", OUT, victim=doom)
        for step, nth in learner.items():
            yield Case(plane, f"learner {word} at {step}", "error", KEPT, learner=Doom(step, nth, signalled))


# --- what does it -----------------------------------------------------------------------------------------------------


def on_wire(alter: Callable[[int, torch.Tensor], torch.Tensor]) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        scene.tamper = alter

    return inject


def flip(i: int, buffer: torch.Tensor) -> torch.Tensor:
    if i == 2:
        buffer = buffer.clone()
        buffer[100] ^= 8
    return buffer


def halve(i: int, buffer: torch.Tensor) -> torch.Tensor:
    return buffer[: len(buffer) // 2] if i == 2 else buffer


def scribble(i: int, buffer: torch.Tensor) -> torch.Tensor:
    return buffer.fill_(7) if i == 2 else buffer  # the sender refills its bucket while it is still on the way


def repeat_bucket() -> Callable[[int, torch.Tensor], torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}

    def alter(i: int, buffer: torch.Tensor) -> torch.Tensor:
        seen[i] = buffer.clone()
        return seen[1] if i == 2 and len(seen[1]) == len(buffer) else buffer

    return alter


def old_prologue(i: int, buffer: torch.Tensor) -> torch.Tensor:
    if i == 0:
        buffer = buffer.clone()
        buffer[2] -= 1
    return buffer


def source(change: Callable[[Weights], Weights]) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        scene.yields = change

    return inject


def stale(scene: Scene) -> None:
    """The optimizer stepped, but what is sent is the version before."""
    scene.yields = lambda weights: always(scene.version - 1, V)


def forgotten_adapter(scene: Scene) -> None:
    """The learner trains base + adapter and sends the base: its bytes never change."""
    base = always(1, V)
    scene.truth = lambda: {**base, **adapter(scene.version, V)}  # type: ignore[method-assign]
    scene.yields = lambda weights: base


def half_forgotten_adapter(scene: Scene) -> None:
    """The learner trains both and sends the base alone: the bytes change, and no digest can tell."""
    scene.truth = lambda: {**always(7, V), **adapter(scene.version, V)}  # type: ignore[method-assign]
    scene.yields = lambda weights: {HEAD: weights[HEAD]}


def dies_before_it_confirms(scene: Scene) -> None:
    """Every engine has committed version 2, and nobody ever says whether it is right."""
    scene.canary_fails = True


def in_store(pattern: str, damage: Callable[[Path], None]) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        scene.before_publish = lambda: [damage(p) for p in scene.store_dir.glob(pattern)] and None

    return inject


def flip_file(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def older_file(path: Path) -> None:
    (old,) = path.parent.glob("v00000001.anchor*")
    path.write_bytes(old.read_bytes())


def scaled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 1.001


def transposed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T if name == HEAD else tensor
