"""Topology files to plain data, without YAML's surprises, and with the line each value came from.

    read("T.yaml") -> Source(data={"run": {"steps": 24}, ...}, lines={"run.steps": 3, ...})

Three of YAML 1.1's habits have cost users of comparable systems whole runs, so they are gone: a key that
stands twice is an error (not "the last one wins"), `1e-6` is a number (not a string), and `on`, `yes`, `off`
and dates are strings (only `true` and `false` are booleans).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollout.errors import ConfigError

DEEPEST = 16  # levels of nesting; an alias that contains itself ends here


@dataclass(slots=True)
class Source:
    """What the user said. `lines` maps a dotted path to its line in the file; `sets` are paths given by --set."""

    name: str
    data: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    sets: set[str] = field(default_factory=set)

    def where(self, path: str) -> str:
        """`T.yaml:7` for the nearest enclosing value of the file, `--set` for an override, else `T.yaml`."""
        if path not in self.lines and any(said.startswith(f"{path}.") for said in self.sets):
            return "--set"
        parts = path.split(".")
        for n in range(len(parts), 0, -1):
            head = ".".join(parts[:n])
            if head in self.sets:
                return "--set"
            if head in self.lines:
                return f"{self.name}:{self.lines[head]}"
        return self.name

    def said_by(self, path: str) -> str | None:
        """Where exactly `path` or a value around it was said; None where nobody said it (it is a default)."""
        if any(path == said or path.startswith(said + ".") for said in self.sets):
            return "--set"
        return f"{self.name}:{self.lines[path]}" if path in self.lines else None


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar types of YAML 1.2's core schema and no others."""


_Loader.yaml_implicit_resolvers = {}
for tag, pattern, first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("merge", r"<<", "<"),
):
    initials: list[str | None] = [*first, ""] if tag == "null" else list(first)
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), initials)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value.replace("_", ""))  # "010" is ten, not eight


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def read(path: str | Path, overrides: Iterable[str] = ()) -> Source:
    """Read a topology and apply `--set` overrides. Raises ConfigError naming file, line and remedy."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(p.name for p in file.parent.glob("*.yaml"))[:6] if file.parent.is_dir() else []
        hint = f"; {file.parent} has {', '.join(near)}" if near else "; give the path of a topology file"
        raise ConfigError(f"{file}: no such file{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{file}: is a directory; give the path of a topology file (*.yaml)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); check its permissions and encoding (UTF-8)") from None
    source = parse(text, file.name)
    for override in overrides:
        apply(source, override)
    return source


def parse(text: str, name: str) -> Source:
    """Plain data of one document. Raises ConfigError on broken YAML, a repeated key, or no mapping at the top."""
    loader = _Loader(text)
    source = Source(name, {})
    try:
        node = loader.get_single_node()
        data = {} if node is None else _plain(loader, node, "", source)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax(name, error)) from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: holds {_kind(data)} where sections such as `run:` and `model:` belong")
    source.data = data
    return source


def apply(source: Source, override: str) -> None:
    """Apply one `a.b=c` (c is YAML) in place. Raises ConfigError when it cannot be understood."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path or "" in path.split("."):
        raise ConfigError(f"--set {override}: is not of the form section.key=value, e.g. --set run.steps=8")
    at: Any = source.data
    parts = path.split(".")
    for depth, part in enumerate(parts[:-1]):
        at = _child(at, part, ".".join(parts[: depth + 1]), override)
    value = _value(text, override)
    if isinstance(at, list):
        at[_index(at, parts[-1], path, override)] = value
    else:
        at[parts[-1]] = value
    source.sets.add(path)


def _value(text: str, override: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _plain(loader, node, "", Source("--set", {}))
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: {_syntax('value', error)}; quote it for the shell") from None
    finally:
        loader.dispose()


def _child(at: Any, part: str, path: str, override: str) -> Any:
    if isinstance(at, list):
        child = at[_index(at, part, path, override)]
    else:
        child = at.setdefault(part, {})
        if child is None:
            child = at[part] = {}
    if not isinstance(child, dict | list):
        raise ConfigError(f"--set {override}: {path} is {child!r}, which has no keys; set {path} itself")
    return child


def _index(at: list[Any], part: str, path: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(at):
        raise ConfigError(f"--set {override}: {path} is no entry of a list of {len(at)}; entries count from 0")
    return int(part)


def _plain(loader: _Loader, node: yaml.Node, path: str, source: Source) -> Any:
    """One node as dicts, lists and scalars, noting each value's line on the way."""
    if path.count(".") > DEEPEST:
        raise yaml.MarkedYAMLError(problem=f"nests deeper than {DEEPEST} levels", problem_mark=node.start_mark)
    if path:
        source.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        _refuse_repeats(loader, node, path)
        loader.flatten_mapping(node)
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            child = f"{path}.{key}" if path else key
            source.lines[child] = key_node.start_mark.line + 1
            out[key] = _plain(loader, value_node, child, source)
        return out
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, f"{path}.{n}", source) for n, item in enumerate(node.value)]
    return loader.construct_object(node, deep=True)


def _refuse_repeats(loader: _Loader, node: yaml.MappingNode, path: str) -> None:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen and key != "<<":
            name = f"{path}.{key}" if path else key
            raise yaml.MarkedYAMLError(
                problem=f"{name}: stands twice, first in line {seen[key]}; keep one of them",
                problem_mark=key_node.start_mark,
            )
        seen[key] = line


def _syntax(name: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    at = f"{name}:{mark.line + 1}" if mark else name
    if "stands twice" in problem:
        return f"{at}: {problem}"
    context = getattr(error, "context", None)
    return f"{at}: is not valid YAML: {context + ', ' if context else ''}{problem}"


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else f"the value {value!r}"
