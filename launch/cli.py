"""The `headrace` command. Parses, calls one function, and turns what it raises into an exit code.

    0  done          1  it ran and the answer is no (a soak that lost something, a doctor who found something)
    2  your input    one line on stderr: the place, the field, the value, the remedy
    130  Ctrl-C

Each command imports what it needs when it is called, so that `plan`, `explain` and `status` start without torch.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rollout.errors import ConfigError, HeadraceError

ROOT = Path(__file__).parent.parent


class _Parser(argparse.ArgumentParser):
    """argparse, with errors on one line and a guess at what was meant."""

    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("headrace").strip()
        raise ConfigError(f"{command + ': ' if command else ''}{_guess(message)}; see {self.prog} --help")


def _guess(message: str) -> str:
    _, found, rest = message.partition("invalid choice: ")
    if not found:
        return message
    given, _, choices = rest.partition(" (choose from ")
    known = [c.strip().strip("'\"") for c in choices.rstrip(")").split(",")]
    near = difflib.get_close_matches(given.strip("'"), known, n=1)
    return f"{given} is not known; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        arguments, rest = parser().parse_known_args(argv)
        if rest and not arguments.passes_rest:
            name = arguments.command
            raise ConfigError(f"{name}: {rest[0]} is not known; see headrace {name} --help")
        return int(arguments.call(arguments, rest) or 0)
    except ConfigError as error:
        print(f"headrace: {_one_line(error)}", file=sys.stderr)
        return 2
    except HeadraceError as error:
        print(f"headrace: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `headrace explain T | head`
        sys.stderr.close()
        return 0


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def parser() -> argparse.ArgumentParser:
    """All commands; those whose backend is not installed are not offered."""
    top = _Parser(prog="headrace", description="Asynchronous RL post-training: rollouts, a durable queue, a learner.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, call: Callable[..., Any], text: str, passes_rest: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, add_help=not passes_rest, allow_abbrev=False)
        sub.set_defaults(call=call, passes_rest=passes_rest)
        return sub

    run = _topology(command("run", _run, "run a topology, or go on with a run directory"))
    run.add_argument("--run-dir", metavar="D", help="where files go; default: <run.dir>/<run.name>-NNN")
    run.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint (of --run-dir, or of the newest run)"
    )

    plan = _topology(command("plan", _plan, "solve the placement and show what follows, starting nothing"))
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument(
        "--inventory", metavar="FILE", help="plan for these hosts instead of this one (YAML or JSON list)"
    )

    explain = _topology(command("explain", _explain, "say what a key is, means, affects, and who said it"))
    explain.add_argument("key", nargs="?", help="e.g. staleness.bound, or a section; without it: every value")

    simulate = _topology(command("simulate", _simulate, "predict step time, idle split and staleness"))
    simulate.add_argument("--json", action="store_true", help="print JSON")
    simulate.add_argument("--from", dest="measured", metavar="D", help="take the stage times from this run directory")

    for name, call, text in (
        ("status", _status, "what a run is doing and has done"),
        ("why", _why, "why is it slow, why is it stuck: who waits for what, and what would end the wait"),
        ("report", _report, "write report.html and curves.png"),
    ):
        sub = command(name, call, text)
        sub.add_argument("run_dir", metavar="D", help="a run directory")
        if name != "report":
            sub.add_argument("--json", action="store_true", help="print JSON")

    doctor = command("doctor", _doctor, "check this machine and installation, with a remedy for what is broken")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    _backed_commands(command)
    return top


def backends(folder: str, prefix: str) -> list[str]:
    """Names of the modules `<folder>/<prefix>NAME.py` that have a `main`."""
    files = sorted((ROOT / folder).glob(f"{prefix}*.py"))
    return [f.stem.removeprefix(prefix) for f in files if "\ndef main(" in f.read_text(encoding="utf-8")]


def _backed_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Commands that pass their arguments on to a module; absent where the module is."""
    benches, soaks = backends("benchmarks", ""), backends("launch", "soak_")
    if benches:
        bench = command("bench", _bench, f"measure: {', '.join(benches)}", passes_rest=True)
        bench.add_argument("name", choices=benches)
    if soaks:
        soak = command(
            "soak", _soak, f"kill things at random and audit what is left: {', '.join(soaks)}", passes_rest=True
        )
        soak.add_argument("name", choices=soaks)
    if importlib.util.find_spec("launch.export"):
        export = command("export", _export, "write trained weights as a Hugging Face directory")
        export.add_argument("run_dir", metavar="D", help="a run directory")
        export.add_argument("--out", required=True, metavar="HF_DIR")
        export.add_argument("--version", type=int, help="which checkpoint; default: the newest whole one")
        export.add_argument(
            "--adapter", action="store_true", help="the adapters alone (LoRA), not merged into the model"
        )
    if importlib.util.find_spec("rollout.journal"):
        rollouts = command("export-rollouts", _export_rollouts, "write the journal's groups as a data set")
        rollouts.add_argument("run_dir", metavar="D", help="a run directory")
        rollouts.add_argument(
            "--out", required=True, metavar="FILE", help="FILE.jsonl or FILE.parquet; jsonl, parquet: in D"
        )
        rollouts.add_argument("--min-version", type=int, default=0, help="leave out answers with an older token")
        rollouts.add_argument("--max-version", type=int, help="leave out answers with a newer token")
        rollouts.add_argument(
            "--status", choices=("finished", "truncated", "failed"), help="only answers that ended so"
        )
        rollouts.add_argument(
            "--verdict", choices=("scored", "failed", "timed_out", "none"), help="only answers judged so"
        )


def _topology(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
    sub.add_argument("topology", metavar="T.yaml", help="a topology file")
    sub.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="A.B=C", help="override one value (YAML)"
    )
    return sub


# ---- the commands


def _run(a: argparse.Namespace, _: list[str]) -> int:
    from launch.opening import open_run
    from launch.run import run

    config, directory = open_run(a.topology, a.overrides, a.run_dir, a.resume)
    try:
        return run(config, directory.path, a.resume)
    finally:
        directory.forget_if_empty()  # it was refused before it began


def _plan(a: argparse.Namespace, _: list[str]) -> None:
    from launch.config import load
    from launch.inventory import local_inventory, read_inventory
    from launch.plan import make_plan

    inventory = read_inventory(a.inventory) if a.inventory else local_inventory()
    plan = make_plan(load(a.topology, a.overrides), inventory)
    print(plan.json() if a.json else plan.text())


def _explain(a: argparse.Namespace, _: list[str]) -> None:
    from launch.config import load_with_source
    from launch.explain import explain

    print(explain(load_with_source(a.topology, a.overrides), a.key))


def _simulate(a: argparse.Namespace, _: list[str]) -> None:
    from launch.config import load
    from launch.run_dir import RunDirectory
    from launch.simulate import Stages, predict

    config = load(a.topology, a.overrides)
    stages = Stages.measured(RunDirectory.open(a.measured)) if a.measured else Stages.assumed(config)
    prediction = predict(config, stages)
    print(json.dumps(prediction.as_dict()) if a.json else prediction.text())


def _status(a: argparse.Namespace, _: list[str]) -> None:
    from launch.diagnosis import read_run
    from launch.status import status_data, status_text

    state = read_run(a.run_dir)
    print(json.dumps(status_data(state)) if a.json else status_text(state))


def _why(a: argparse.Namespace, _: list[str]) -> None:
    from launch.diagnosis import diagnose, read_run

    findings = diagnose(read_run(a.run_dir))
    print(json.dumps([f._asdict() for f in findings]) if a.json else "\n".join(f.text() for f in findings))


def _report(a: argparse.Namespace, _: list[str]) -> None:
    from launch.report import write
    from launch.run_dir import RunDirectory

    for path in write(RunDirectory.open(a.run_dir).path):
        print(path)


def _doctor(a: argparse.Namespace, _: list[str]) -> int:
    from launch.doctor import examine, text

    checks = examine()
    print(json.dumps([c._asdict() for c in checks]) if a.json else text(checks))
    return int(any(c.state == "broken" for c in checks))


def _bench(a: argparse.Namespace, rest: list[str]) -> Any:
    return importlib.import_module(f"benchmarks.{a.name}").main(rest)


def _soak(a: argparse.Namespace, rest: list[str]) -> Any:
    return importlib.import_module(f"launch.soak_{a.name}").main(rest)


def _export(a: argparse.Namespace, _: list[str]) -> None:
    from launch.export import export, export_adapter
    from launch.run_dir import RunDirectory

    write = export_adapter if a.adapter else export
    print(write(RunDirectory.open(a.run_dir), Path(a.out), a.version))


def _export_rollouts(a: argparse.Namespace, _: list[str]) -> None:
    from launch.export_rollouts import Filters, export_rollouts
    from launch.run_dir import RunDirectory

    filters = Filters(a.min_version, a.max_version, a.status, a.verdict)
    path, groups, answers = export_rollouts(RunDirectory.open(a.run_dir), a.out, filters)
    print(f"{path}: {answers} answers of {groups} groups")


if __name__ == "__main__":
    sys.exit(main())
