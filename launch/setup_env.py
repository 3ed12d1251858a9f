"""`make setup`: builds, checks and repairs the environment of this checkout. Standard library only.

    steps        1 virtual environment  2 torch  3 the locked packages  4 Headrace itself  5 verify
    idempotent   a ready environment is recognised in about a second and left alone
    repair       every installed file is compared with what its package says it installed; packages with a missing
                 or truncated file, and those of another version than the lock's, are installed again

Runs under any Python >= 3.11: `python3 launch/setup_env.py [--venv .venv]`.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-cpu.lock"
STAMP = "headrace-ready"
# Runs inside the environment: prints the distributions whose files are missing or have another size than recorded.
SURVEY = """
import importlib.metadata as m, os, re
for d in m.distributions():
    name = re.sub(r"[-_.]+", "-", d.metadata["Name"] or "").lower()
    whole = all(
        os.path.exists(p := f.locate()) and (f.size is None or p.suffix == ".pyc" or os.path.getsize(p) == f.size)
        for f in d.files or () if f.suffix != ".pyc"
    )
    print(name, d.version, "whole" if whole else "damaged")
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    """Package name -> version, as the lock file says."""
    lines = (line.split("#")[0].strip() for line in LOCK.read_text().splitlines())
    return {canonical(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def fingerprint() -> str:
    """Changes whenever the environment would have to."""
    parts = (LOCK.read_bytes(), (ROOT / "pyproject.toml").read_bytes(), sys.version.encode(), str(ROOT).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


class Environment:
    """One virtual environment and what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path, self.python = path, path / "bin" / "python"

    def runs(self) -> bool:
        if not self.python.exists():
            return False
        return subprocess.run([self.python, "-m", "pip", "--version"], capture_output=True).returncode == 0

    def create(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.path)], check=True)

    def pip(self, *args: str) -> None:
        subprocess.run([self.python, "-m", "pip", "install", "--quiet", *args], check=True, cwd=ROOT)

    def wrong(self) -> list[str]:
        """Requirement lines that are absent, of another version, or damaged on disk."""
        listing = subprocess.run([self.python, "-c", SURVEY], capture_output=True, text=True, check=True).stdout
        have = {name: (version.split("+")[0], state) for name, version, state in map(str.split, listing.splitlines())}
        return [f"{n}=={v}" for n, v in locked().items() if have.get(n) != (v.split("+")[0], "whole")]

    def has_headrace(self) -> bool:
        probe = "import importlib.metadata as m, launch, pathlib; m.distribution('headrace'); print(launch.__file__)"
        done = subprocess.run([self.python, "-c", probe], capture_output=True, text=True, cwd="/")
        return done.returncode == 0 and Path(done.stdout.strip()).is_relative_to(ROOT)


def step(text: str, started: float) -> None:
    print(f"[setup {time.monotonic() - started:5.0f} s] {text}", flush=True)


def require_tools() -> None:
    """Stop with the remedy before minutes are spent."""
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        sys.exit(
            "setup: no C++ compiler found; install one (Debian: `apt-get install g++`), vLLM compiles a small helper"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        sys.exit(f"setup: {header} is missing; install Python's headers (Debian: `apt-get install python3-dev`)")


def install(env: Environment, started: float) -> None:
    wrong = env.wrong()
    torch = [line for line in wrong if line.startswith("torch==")]
    rest = [line for line in wrong if not line.startswith("torch==")]
    if torch:
        step(f"installing {torch[0]} (CPU build, about 200 MB)", started)
        env.pip("--force-reinstall", "--no-deps", *torch)
    if rest:
        step(f"installing {len(rest)} locked packages (about 3 GB on disk, 2-5 minutes)", started)
        env.pip("--force-reinstall", "--no-deps", *rest)
    if not env.has_headrace():
        step("installing Headrace itself (editable)", started)
        env.pip("--no-deps", "--no-build-isolation", "--editable", ".")


def verify(env: Environment) -> None:
    left = env.wrong()
    if left:
        sys.exit(
            f"setup: still wrong after installing: {' '.join(left[:5])}; remove {env.path} and run `make setup` again"
        )
    probe = "import torch, sys; sys.exit(3 if torch.version.cuda else 0)"
    code = subprocess.run([env.python, "-c", probe]).returncode
    if code == 3:
        sys.exit(
            "setup: this index gave a CUDA build of torch; add PyTorch's CPU index to pip and run `make setup` again"
        )
    if code:
        sys.exit(f"setup: torch does not import; remove {env.path} and run `make setup` again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    env = Environment(parser.parse_args().venv.resolve())
    started, mark = time.monotonic(), fingerprint()
    require_tools()
    stamp = env.path / STAMP
    if env.runs() and stamp.exists() and stamp.read_text() == mark and not env.wrong() and env.has_headrace():
        return step("the environment is ready", started)
    stamp.unlink(missing_ok=True)
    if not env.runs():
        step(
            f"making a virtual environment in {env.path.name} (the whole set-up takes 2-6 minutes and about 4 GB)",
            started,
        )
        env.create()
    install(env, started)
    step("verifying", started)
    verify(env)
    stamp.write_text(mark)
    step(f"ready: {env.path.name}/bin/headrace --help", started)


if __name__ == "__main__":
    main()
