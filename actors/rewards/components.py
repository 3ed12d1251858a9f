"""One entry of `rewards:` -> a callable (prompt, answer, meta) -> object. Loading happens inside the worker process.

A user's function is called as `function(prompt, answer, meta, **args)` with the prompt's text, the answer's text up to
the stop string, and the prompt's row, and returns a number:

    def brevity(prompt: str, answer: str, meta: dict) -> float:
        return 1.0 / (1 + len(answer))
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actors.rewards.verifiers import PACKAGES, VERIFIERS

Reward = Callable[[str, str, Mapping[str, Any]], object]


class LoadError(Exception):
    """A component cannot be loaded; the message says why and what to do. The driver turns it into a ConfigError."""


def load(kind: str, name: str | None, path: str | None, args: Mapping[str, Any]) -> Reward:
    """The callable behind a component. Raises LoadError; whatever the user's module raises on import passes through."""
    if kind == "function":
        function = _import_function(path or "")
        _check_call(f"function {path}", function, args, positional=3)
        return lambda prompt, answer, meta: function(prompt, answer, meta, **args)
    verifier = _verifier(name or "")
    _check_call(f"verifier {name}", verifier, args, positional=2)
    if "pattern" in args:
        _check_pattern(args["pattern"])
    return lambda prompt, answer, meta: verifier(answer, meta, **args)


def needed_column(kind: str, name: str | None, args: Mapping[str, Any]) -> str | None:
    """The meta column without which a verifier cannot judge, None when there is none (or nobody knows)."""
    if kind != "verifier" or name not in VERIFIERS:
        return None
    if name == "reasoning_gym":
        return "reasoning_gym"
    column = args.get("reference", inspect.signature(VERIFIERS[name]).parameters["reference"].default)
    return column if isinstance(column, str) else None


def _verifier(name: str) -> Callable[..., float]:
    if name not in VERIFIERS:
        near = difflib.get_close_matches(name, VERIFIERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(VERIFIERS)}; your own: kind: function"
        raise LoadError(f"verifier {name!r} does not exist; {hint}")
    if name in PACKAGES:
        module, package = PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            raise LoadError(f"verifier {name} needs the package {package}; pip install {package}")
        importlib.import_module(module)  # now, so that it does not count against the first sample's deadline
    return VERIFIERS[name]


def _import_function(path: str) -> Callable[..., object]:
    source, _, attribute = path.rpartition(":")
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    function = getattr(module, attribute, None)
    if function is None:
        names = [n for n, f in vars(module).items() if inspect.isfunction(f)]
        near = difflib.get_close_matches(attribute, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'no function'}"
        raise LoadError(f"{source} has no {attribute!r}; {hint}")
    if not callable(function):
        raise LoadError(f"{path} is {type(function).__name__}, not a function")
    return function


def _import_module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise LoadError(
                f"module {name!r} is neither installed nor in {Path.cwd()}; "
                "for a file write its path: my_rewards.py:function"
            ) from None
        raise


def _import_file(file: Path) -> Any:
    if not file.is_file():
        raise LoadError(f"{file} does not exist (looked from {Path.cwd()})")
    sys.path.insert(0, str(file.parent.resolve()))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _check_call(what: str, function: Callable[..., object], args: Mapping[str, Any], positional: int) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # builtins do not say; the first call will
    try:
        signature.bind(*range(positional), **args)
    except TypeError as error:
        wanted = "(prompt, answer, meta, **args)" if positional == 3 else str(signature)
        raise LoadError(f"{what} cannot be called with args {dict(args)!r}: {error}; it takes {wanted}") from None


def _check_pattern(pattern: object) -> None:
    try:
        re.compile(str(pattern))
    except re.error as error:
        raise LoadError(f"pattern {pattern!r} is not a regular expression: {error}") from None
