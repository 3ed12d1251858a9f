"""python -m learner.conformance FILE.json [--json]: replay golden values through the functions that training uses.

    file (schema of tests/learner/golden.json)  ->  each case's name and config  ->  Choices
        ->  advantages.compute + objective.policy_loss + backward  ->  compared with the numbers in the case

A case is found by the family in its name; masks, numbers, sample counts and groups come from the file. A case nobody
knows is "unimplemented" and fails the run: nothing is skipped. Everything is float64; the tolerance is absolute.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.conformance_cases import replay
from learner.conformance_inputs import Document, Unimplemented
from rollout.errors import ConfigError

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Outcome:
    """Outcome("dapo/ragged", {"loss": 3e-17, "dloss_dlogprob": 1e-17}, note=""); errors is empty when unimplemented."""

    name: str
    errors: Mapping[str, float]
    note: str = ""

    @property
    def worst(self) -> float:
        return max((math.inf if math.isnan(e) else e for e in self.errors.values()), default=math.inf)

    @property
    def passed(self) -> bool:
        return self.worst <= TOLERANCE

    @property
    def value_error(self) -> float | None:
        return _largest(e for k, e in self.errors.items() if not _is_gradient(k))

    @property
    def gradient_error(self) -> float | None:
        return _largest(e for k, e in self.errors.items() if _is_gradient(k))


def run(raw: Mapping[str, Any]) -> list[Outcome]:
    """Every case of a loaded file, in its order."""
    document = Document(raw)
    outcomes = []
    for name, case in document.cases.items():
        try:
            outcomes.append(Outcome(name, replay(name, case, document)))
        except Unimplemented as missing:
            outcomes.append(Outcome(name, {}, note=f"unimplemented: {missing}"))
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, ConfigError) as broken:
            outcomes.append(Outcome(name, {}, note=f"cannot be replayed: {type(broken).__name__}: {broken}"))
    return outcomes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m learner.conformance", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="golden values (schema of golden.json)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(argv)
    try:
        outcomes = run(_load(options.file))
    except ConfigError as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    failed = [o for o in outcomes if not o.passed]
    if options.json:
        print(json.dumps(_summary(options.file, outcomes), indent=1, sort_keys=False))
    else:
        for o in outcomes:
            print(_line(o))
        print(f"{len(outcomes) - len(failed)} of {len(outcomes)} cases within {TOLERANCE:g} (float64)")
    return 1 if failed else 0


def _load(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("cases"), dict) or not raw["cases"]:
        raise ConfigError(f"{path}: no 'cases' object; expected the schema of golden.json")
    return raw


def _summary(path: Path, outcomes: list[Outcome]) -> dict[str, Any]:
    cases = {
        o.name: {
            "status": "pass" if o.passed else "fail" if o.errors else "unimplemented",
            "value_error": _finite(o.value_error),
            "gradient_error": _finite(o.gradient_error),
            "errors": {k: _finite(v) for k, v in o.errors.items()},
            **({"note": o.note} if o.note else {}),
        }
        for o in outcomes
    }
    return {
        "file": str(path),
        "tolerance": TOLERANCE,
        "passed": sum(o.passed for o in outcomes),
        "failed": sum(not o.passed and bool(o.errors) for o in outcomes),
        "unimplemented": sum(not o.errors for o in outcomes),
        "cases": cases,
    }


def _line(o: Outcome) -> str:
    if not o.errors:
        return f"FAIL  {o.name:<46} {o.note}"
    value, gradient = (f"{e:.1e}" if e is not None else "   --  " for e in (o.value_error, o.gradient_error))
    line = f"{'ok  ' if o.passed else 'FAIL'}  {o.name:<46} value {value}  gradient {gradient}"
    bad = [f"{k} {e:.1e}" for k, e in o.errors.items() if not e <= TOLERANCE]
    return line + (f"  off: {', '.join(bad)}" if bad else "")


def _is_gradient(quantity: str) -> bool:
    return quantity.startswith(("dloss", "dvalueloss", "dH")) or quantity.endswith("grad")


def _largest(errors: Any) -> float | None:
    return max((math.inf if math.isnan(e) else e for e in errors), default=None)


def _finite(x: float | None) -> float | str | None:
    return x if x is None or math.isfinite(x) else str(x)


if __name__ == "__main__":
    raise SystemExit(main())
