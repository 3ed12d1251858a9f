"""Reading golden files: inputs, masks and case names as tensors and numbers. float64 throughout."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learner.choices import Choices
from rollout.errors import ConfigError

INPUTS = frozenset({"rewards", "group_ids", "logp", "logp_old", "logp_behave", "logp_ref"})
NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
Case = Mapping[str, Any]


def tensor(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def error(got: Tensor | float | bool, want: Any) -> float:
    """Largest absolute difference; inf where the shapes differ or exactly one side is NaN."""
    a, b = torch.as_tensor(got, dtype=torch.float64).detach(), tensor(want)
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 0:
        return 0.0
    same = torch.isnan(a) & torch.isnan(b)
    gap = torch.where(same | (a == b), torch.zeros_like(a), (a - b).abs())
    return math.inf if bool(torch.isnan(gap).any()) else float(gap.max())


def numbers(text: str) -> list[float]:
    """The numbers in a name such as geo_mask_0.8_1.25_tokenIS: [0.8, 1.25]."""
    return [float(x) for x in re.findall(rf"(?<![\d.]){NUMBER}", text)]


class Unimplemented(Exception):
    """A family, row or quantity that no function here reproduces."""


@dataclass(frozen=True)
class Document:
    """A loaded file. `inputs` are shared by the cases; a case may bring its own."""

    raw: Mapping[str, Any]

    @property
    def cases(self) -> Mapping[str, Case]:
        cases: Mapping[str, Case] = self.raw["cases"]
        return cases

    @property
    def length_constant(self) -> float | None:
        x = self.raw.get("meta", {}).get("Dr_GRPO_L_max")
        return None if x is None else float(x)

    def of(self, case: Case) -> Document:
        """The same file with whatever inputs the case brings itself laid over the shared ones."""
        own = {k: v for k, v in case.items() if k in INPUTS}
        nested = case.get("inputs", {})
        return Document({**self.raw, "inputs": {**self.raw.get("inputs", {}), **nested, **own}})

    def column(self, name: str) -> Tensor:
        """logp, logp_old, logp_behave, logp_ref [B, L]; from probabilities and ratios where log-probs are not given."""
        inputs = self.raw.get("inputs", {})
        if name in inputs:
            return tensor(inputs[name])
        derived = {
            "logp_old": lambda: tensor(inputs["prob_old"]).log(),
            "logp_ref": lambda: tensor(inputs["prob_ref"]).log(),
            "logp": lambda: self.column("logp_old") + tensor(inputs["ratio"]).log(),
            "logp_behave": lambda: self.column("logp_old") - tensor(inputs["behav_weight"]).log(),
        }
        try:
            return derived[name]()
        except KeyError as missing:
            raise ConfigError(f"inputs.{name} is missing and cannot be derived (no {missing})") from missing

    def rewards(self) -> Tensor:
        return tensor(self.raw["inputs"]["rewards"])

    def group_ids(self) -> Tensor:
        """[B] in 0..n-1; one group where the file does not say."""
        ids = self.raw["inputs"].get("group_ids")
        if ids is None:
            return torch.zeros(len(self.rewards()), dtype=torch.long)
        return dense(ids)

    def mask(self, name: str, case: Case) -> Tensor:
        """[B, L] bool: the case's own mask, a mask it names, or the one its name holds (kl/ragged/k1)."""
        masks = self.raw.get("inputs", {}).get("masks", {})
        given = case.get("mask")
        if isinstance(given, str):
            given = masks.get(given)
        if given is None:
            given = next((masks[part] for part in name.split("/") if part in masks), None)
        if given is None:
            raise ConfigError(f"case {name}: no mask, and its name holds none of {sorted(masks)}")
        return tensor(given).bool()


def dense(ids: Any) -> Tensor:
    """Any group labels -> 0..n-1 in order of first value."""
    return torch.unique(torch.as_tensor(ids), return_inverse=True)[1]


def choices(**values: Any) -> Choices:
    """Choices without correction or eps unless said: a peer's conventions are explicit in each case."""
    plain: dict[str, Any] = {"advantage_eps": 0.0, "whiten_eps": 1e-8, "correction": "none", "correction_high": None}
    return Choices.model_validate({"preset": "conformance", **plain, **values})
