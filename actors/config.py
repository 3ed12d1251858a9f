"""The parts of a topology that concern prompts, rewards and the model. Importable without torch or transformers.

model:   {path: models/smollm2-135m, dtype: bfloat16}
prompts: {source: jsonl, path: data/sort3.jsonl, held_out: 64}
rewards: [{kind: verifier, name: exact, weight: 1.0}]
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollout.config import Section


class ModelConfig(Section):
    """The Hugging Face directory that the engines serve and the learner trains."""

    path: str = Field(description="directory with config.json, tokenizer and safetensors")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="serving type of the weights")
    max_context: int | None = Field(
        None, ge=2, description="prompt + answer tokens of one sequence; none: what the model's config.json says"
    )


class PromptsConfig(Section):
    """Where prompts come from; `actors.prompts.PromptSource` turns an ordinal into one of them."""

    source: Literal["jsonl", "parquet", "reasoning_gym"] = Field("jsonl", description="a file, or generated tasks")
    path: str | None = Field(None, description="the file (jsonl, parquet)")
    held_out: int = Field(0, ge=0, description="prompts set aside for evaluation; never trained on")
    held_out_path: str | None = Field(
        None, description="a file of its own for the held-out prompts: its first `held_out` rows, all of them if 0"
    )
    task: str | None = Field(None, description="name of the reasoning_gym task")
    args: dict[str, Any] = Field(default_factory=dict, description="settings of the reasoning_gym task")
    shots: int = Field(0, ge=0, le=8, description="solved examples before the question (reasoning_gym)")
    columns: dict[str, str] = Field(
        default_factory=dict, description="our name -> your column, e.g. {prompt: question, answer: solution}"
    )
    template: str | None = Field(None, description='text around a plain prompt, e.g. "Question: {prompt}\\nAnswer:"')
    chat: bool = Field(False, description="wrap a plain prompt as a user message in the model's chat template")
    system: str | None = Field(None, description="system message of a chat prompt")
    drop_longer_than: int | None = Field(
        None, ge=1, description="leave out prompts of more tokens; one that is left in must fit the context"
    )

    @model_validator(mode="after")
    def _source_has_what_it_needs(self) -> Self:
        if self.source == "reasoning_gym":
            if self.task is None:
                raise ValueError("source reasoning_gym needs task, e.g. task: chain_sum")
            for key in ("path", "held_out_path", "columns"):
                if getattr(self, key):
                    raise ValueError(f"{key} has no meaning for source reasoning_gym; remove it")
        else:
            if self.path is None:
                raise ValueError(f"source {self.source} needs path, e.g. path: data/prompts.{self.source}")
            for key in ("task", "args", "shots"):
                if getattr(self, key):
                    raise ValueError(f"{key} only has a meaning for source reasoning_gym; remove it")
        if self.template is not None and self.template.count("{prompt}") != 1:
            raise ValueError(f"template {self.template!r} must contain {{prompt}} exactly once")
        if self.system is not None and not self.chat:
            raise ValueError("system only has a meaning with chat: true")
        return self


class RewardConfig(Section):
    """One component of the reward. The value trained on is the weighted sum of all components.

    verifier: `name` is exact, contains, regex, numeric, math or reasoning_gym.
    function: `path` names the user's own, "package.module:function" or "file.py:function".
    length:   the number of answer tokens (for watching: weight 0, or a small negative weight).
    overlong: DAPO's soft punishment, 0 down to -1 over the last `cache` of `max` tokens.
    """

    kind: Literal["verifier", "function", "length", "overlong"] = Field(
        "verifier", description="how an answer is judged"
    )
    name: str | None = Field(None, description="the verifier; for other kinds the component's name in the metrics")
    label: str | None = Field(None, description="name in the metrics where one verifier is used twice")
    path: str | None = Field(None, description="import path of a function")
    weight: float = Field(
        1.0, allow_inf_nan=False, description="0: measured, never trained on, and its failures cost nothing"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the verifier or function")
    deadline_s: float = Field(5.0, gt=0, le=3600, description="seconds for one sample, then its process is killed")
    memory_mb: int = Field(2048, ge=64, description="memory of the worker process")
    breaker: int = Field(32, ge=1, description="failures in a row that take the component out of service for a while")

    @property
    def component(self) -> str:
        """The key under which this component is reported, e.g. 'exact' in reward/exact."""
        return self.label or self.name or (self.path or self.kind).rpartition(":")[2]

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> Self:
        if self.kind == "verifier" and self.name is None:
            raise ValueError("kind verifier needs name, e.g. name: exact")
        if self.kind == "function" and (self.path is None or not all(self.path.rpartition(":")[::2])):
            raise ValueError(f"kind function needs path as module:function, got {self.path!r}")
        if self.kind != "function" and self.path is not None:
            raise ValueError(f"path only has a meaning for kind function, not {self.kind}")
        if not re.fullmatch(r"[\w.-]+", self.component):
            raise ValueError(f"the component's name {self.component!r} may have letters, digits, _ . - only; set label")
        if self.kind == "length" and self.args:
            raise ValueError("kind length takes no args")
        if self.kind == "overlong" and not _is_overlong(self.args):
            raise ValueError(
                f"kind overlong needs args: {{max: tokens, cache: tokens}} with 0 < cache <= max, got {self.args!r}"
            )
        return self


def _is_overlong(args: dict[str, Any]) -> bool:
    whole = args.keys() == {"max", "cache"} and all(type(v) is int for v in args.values())
    return whole and 0 < args["cache"] <= args["max"]
