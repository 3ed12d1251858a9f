"""What pydantic refused, as one line a user can act on.

T.yaml:9: algorithm.groups_per_stp: 8: no such key; did you mean algorithm.groups_per_step?
T.yaml:3: run.steps: "24": must be a whole number; write it without quotes
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launch.yaml_reader import Source

WANTED = {  # pydantic's name of a failure -> what to write instead
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping, e.g. {key: value}",
    "model_type": "must be a section with keys of its own",
    "model_attributes_type": "must be a section with keys of its own",
    "tuple_type": "must be a list, e.g. [a, b]",
    "list_type": "must be a list, e.g. [a, b]",
}


def first_problem(error: ValidationError, source: Source, model: type[BaseModel]) -> str:
    """The first problem in file order (misspelt keys before what they left missing), and how many more there are."""
    problems = [p for p in error.errors(include_url=False) if not _echo(p)]
    problems.sort(key=lambda p: _rank(p, source))
    here = _path(problems[0], source)
    line = _sentence([p for p in problems if _path(p, source) == here], source, model)
    more = len({_path(p, source) for p in problems}) - 1
    return line if not more else f"{line} (and {more} more problem{'s' if more > 1 else ''})"


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a model, sections included; entries of a list are written as `rewards.0.name`."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        inner, in_list = section_of(field.annotation)
        if inner is not None:
            yield from keys_of(inner, f"{path}.0." if in_list else f"{path}.")


def section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that a field's type holds, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    in_list = origin in (tuple, list)
    if in_list or origin in (typing.Union, types.UnionType):
        for arg in args:
            inner, nested = section_of(arg)
            if inner is not None:
                return inner, in_list or nested
    return None, False


def nearest(path: str, model: type[BaseModel]) -> str | None:
    """The key a user most likely meant: a near name in the same section, else the same name in another one."""
    keys = [k for k in keys_of(model)]
    section, _, name = path.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if _same_section(k.rpartition(".")[0], section)}
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    if near:
        return f"{section}.{near[0]}" if section else near[0]
    elsewhere = [k for k in keys if k.rpartition(".")[2] == name]
    if elsewhere:
        return elsewhere[0]
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    if near:
        return f"{section}.{near[0]}" if section else near[0]
    loose = difflib.get_close_matches(path, keys, n=1, cutoff=0.75)
    return loose[0] if loose else None


def _same_section(a: str, b: str) -> bool:
    return [p.isdigit() or p for p in a.split(".")] == [p.isdigit() or p for p in b.split(".")]


def _echo(problem: ErrorDetails) -> bool:
    """pydantic calls a list too short when its entries were refused; the entries have said why already."""
    return problem["type"] == "too_short" and len(problem["input"]) >= problem["ctx"]["min_length"]


def _rank(problem: ErrorDetails, source: Source) -> tuple[int, int]:
    path = _path(problem, source)
    line = source.lines.get(path, 0)
    return ({"extra_forbidden": 0, "missing": 2}.get(problem["type"], 1), line)


def _path(problem: ErrorDetails, source: Source) -> str:
    """pydantic's location as the path that stands in the file (without the names of union members)."""
    at: Any = source.data
    parts: list[str] = []
    location = problem["loc"]
    for n, part in enumerate(location):
        last = n == len(location) - 1
        if _holds(at, part):
            at = at[part]
        elif not (last and problem["type"] == "missing"):
            continue
        parts.append(str(part))
    return ".".join(parts)


def _holds(at: Any, part: int | str) -> bool:
    return part in at if isinstance(at, dict) else isinstance(at, list) and isinstance(part, int) and part < len(at)


def _sentence(problems: list[ErrorDetails], source: Source, model: type[BaseModel]) -> str:
    """The first one; where a value may be of several kinds and is of none, pydantic names one problem for each."""
    problem = problems[0]
    path, kind = _path(problem, source), problem["type"]
    if kind == "missing":
        return f"{source.where(path)}: {path}: is missing; add it{_what_for(path, model)}"
    where, value = source.where(path), _shown(problem["input"])
    head = f"{where}: {path}: " if path else f"{where}: "
    if kind == "extra_forbidden":
        near = nearest(path, model)
        return f"{head}{value}: no such key; " + (f"did you mean {near}?" if near else _known(path, model))
    if kind == "value_error":  # a section's own check: its message names the key already
        return head + str(problem["ctx"]["error"]).rstrip(".")
    demands = dict.fromkeys(map(_demand, problems))
    return f"{head}{value}: {' or '.join(demands).replace(' or must be ', ' or ')}"


def _demand(problem: ErrorDetails) -> str:
    kind, ctx = problem["type"], problem.get("ctx", {})
    value = problem["input"]
    if kind == "literal_error":
        choices = [c.strip().strip("'") for c in ctx["expected"].replace(" or ", ", ").split(",")]
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.7)
        return f"must be {_either(choices)}" + (f"; did you mean {near[0]}?" if near else "")
    if kind in WANTED:
        return WANTED[kind] + (_unquoted(value) if isinstance(value, str) and kind[:3] in ("int", "flo", "boo") else "")
    bounds = {
        "greater_than_equal": ("ge", ">="),
        "greater_than": ("gt", ">"),
        "less_than_equal": ("le", "<="),
        "less_than": ("lt", "<"),
    }
    if kind in bounds:
        key, sign = bounds[kind]
        return f"must be {sign} {ctx[key]:g}"
    if kind == "string_pattern_mismatch":
        return "may only hold letters, digits, dots, dashes and underscores, and begins with a letter or digit"
    if kind in ("too_short", "string_too_short"):
        return f"must have at least {ctx.get('min_length', 1)} entr{'y' if ctx.get('min_length', 1) == 1 else 'ies'}"
    if kind == "too_long":
        return f"must have at most {ctx.get('max_length')} entries"
    return problem["msg"][0].lower() + problem["msg"][1:]


def _either(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def _unquoted(text: str) -> str:
    """What to write where a number or true / false is wanted and text was given."""
    if text.lower() in ("yes", "on", "no", "off"):
        return f"; write {'true' if text.lower() in ('yes', 'on') else 'false'}"
    try:
        float(text)
    except ValueError:
        return "; write it without quotes" if text in ("true", "false") else ""
    return "; write it without quotes"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _known(path: str, model: type[BaseModel]) -> str:
    section = path.rpartition(".")[0]
    names = sorted(k.rpartition(".")[2] for k in keys_of(model) if _same_section(k.rpartition(".")[0], section))
    return f"{section or 'a topology'} knows {', '.join(names)}" if names else f"remove it, {section} takes no keys"


def _what_for(path: str, model: type[BaseModel]) -> str:
    examples = {
        "model": ", e.g. model: {path: models/smollm2-135m}",
        "prompts": ", e.g. prompts: {source: jsonl, path: data/sort3.jsonl, held_out: 64}",
        "rewards": ", e.g. rewards: [{kind: verifier, name: exact}]",
        "model.path": ", e.g. path: models/smollm2-135m",
    }
    return examples.get(path, "")
