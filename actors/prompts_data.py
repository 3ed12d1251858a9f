"""Small data sets made on the spot, each learnable on two CPU cores.

sort3    sort three digits, one solved example in front; SmolLM2-135M goes from 0.1 to 0.9 in minutes (the demo)
letters  a letter to go on from; with the reward `lowercase_share` the tiny random Llama learns it in a few steps

python -m actors.prompts_data sort3 --out data/sort3.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import string
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

DataRow = dict[str, str]


def sort3() -> Iterator[DataRow]:
    """720 rows: every order of every three different digits, once, so that rows and questions are the same thing.

    {"prompt": "sorted([5, 8, 0]) = [0, 5, 8]\\nsorted([3, 1, 2]) =", "answer": "[1, 2, 3]"}
    """
    triples = [list(triple) for triple in itertools.permutations(range(10), 3)]
    for asked in triples:
        shows_something = [t for t in triples if t != sorted(t) and sorted(t) != sorted(asked)]
        example = random.Random(f"sort3/{asked}").choice(shows_something)
        yield {"prompt": f"sorted({example}) = {sorted(example)}\nsorted({asked}) =", "answer": str(sorted(asked))}


def letters() -> Iterator[DataRow]:
    """676 rows: {"prompt": "ab", "answer": "b"}."""
    for a, b in itertools.product(string.ascii_lowercase, repeat=2):
        yield {"prompt": a + b, "answer": b}


def lowercase_share(prompt: str, answer: str, meta: Mapping[str, Any]) -> float:
    """Share of the answer that is a-z: a reward with signal in every group from the first step on."""
    return sum(c in string.ascii_lowercase for c in answer) / max(1, len(answer))


MAKERS: dict[str, Callable[[], Iterator[DataRow]]] = {"sort3": sort3, "letters": letters}


def write(name: str, out: Path) -> int:
    """Write the data set whole or not at all; returns the number of rows. The same bytes every time."""
    rows = [json.dumps(row) for row in MAKERS[name]()]
    out.parent.mkdir(parents=True, exist_ok=True)
    making = out.with_name(f".{out.name}.{os.getpid()}")
    making.write_text("\n".join(rows) + "\n")
    making.replace(out)
    return len(rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m actors.prompts_data", description="Make a small data set.")
    parser.add_argument("name", choices=sorted(MAKERS))
    parser.add_argument("--out", type=Path, help="default: data/NAME.jsonl")
    args = parser.parse_args(argv)
    out = args.out or Path("data") / f"{args.name}.jsonl"
    print(f"{out}: {write(args.name, out)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
