"""What does a weight update cost? Ours against a plain gloo broadcast and vLLM's bare reload, interleaved in one run.

    headrace bench weights --model models/smollm2-135m [--json FILE] [--repeats 20] [--no-engine]

    transfer   bringing a version over, its proof, and how far the resident set of either side rises  weight_transfer
    load       how long generation stands still                                                      weight_stall
    delta      bytes of a version against the one before, in a chain                                 weight_chain

Medians are shown, and the largest rise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.weight_chain import chain
from benchmarks.weight_transfer import transfer

BUCKET = 8 << 20


def load(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def verdicts(found: dict[str, float]) -> list[tuple[str, float, str, bool]]:
    """(what, seen, required, holds) of the requirements that this run measured."""
    rows = [("transfer / what the path can do", found["transfer/share_of_path"], ">= 0.60", 0.6, 1)]
    limit = 2 * BUCKET * 1.1 / 1e6
    for side in ("sender", "receiver"):
        rows.append(
            (f"rise of the {side}'s resident set, MB", found[f"memory/{side}_mb"], f"<= {limit:.1f}", limit, -1)
        )
    if "load/stall_ratio" in found:
        rows.append(("stall / bare load", found["load/stall_ratio"], "<= 1.15", 1.15, -1))
        rows.append(("attestation / whole sync", found["attest/share_of_sync"], "<= 0.05", 0.05, -1))
    if "delta/share_of_full" in found:
        rows.append(("largest delta / full bytes", found["delta/share_of_full"], "<= 0.05", 0.05, -1))
        rows.append((f"{found['delta/steps']:.0f} chained deltas bit-exact", found["delta/bit_exact"], "== 1", 1.0, 1))
    return [(what, seen, want, (seen - bound) * sign >= 0) for what, seen, want, bound, sign in rows]


def measure(args: argparse.Namespace) -> dict[str, float]:
    weights, cores = load(args.model), os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as scratch:
        found = asyncio.run(transfer(weights, args.repeats, scratch, BUCKET))
        os.sched_setaffinity(0, cores)
        if not args.no_engine:
            from benchmarks.weight_stall import stall  # vLLM

            found |= asyncio.run(stall(args.model, weights, args.repeats, scratch, BUCKET))
            found["sync/plain_s"] = found["transfer/plain_s"] + found["load/bare_s"]
            found["sync/ours_s"] = found["transfer/ours_s"] + found["load/stall_s"]
            found["attest/share_of_sync"] = found["attest/seconds"] / found["sync/ours_s"]
        if args.steps:
            found |= chain(weights, args.steps, args.lr, scratch)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace bench weights", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--json", type=Path, help="also write one JSON object to this file")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="length of the chain of deltas; 0 leaves it out")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--no-engine", action="store_true", help="leave vLLM out (no load, no stall)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = measure(args)
    held = verdicts(found)
    for key, value in found.items():
        print(f"{key:32} {value:10.4f}")
    print()
    for what, seen, want, holds in held:
        print(f"{what:40} {seen:8.3f}  {want:8}  {'holds' if holds else 'DOES NOT HOLD'}")
    if args.json:
        args.json.write_text(json.dumps({**found, "held": {w: h for w, _, _, h in held}}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
