"""The parts of a topology that concern making and moving rollouts. Importable without torch, Ray or vLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A section of a topology: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class SamplingConfig(Section):
    """How rollouts are drawn."""

    group_size: int = Field(8, ge=1, description="answers per prompt (G)")
    max_tokens: int = Field(256, ge=1, description="token budget of one answer")
    temperature: float = Field(1.0, gt=0.0, le=4.0, description="logits are divided by it, on both sides")
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="share of the probability to draw from; log-probs stay those of the whole"
    )
    top_k: int = Field(0, ge=0, description="draw from the k likeliest tokens only; 0: from all")
    stop: tuple[str, ...] = Field((), description="strings that end an answer; they stay in its tokens")


class StalenessConfig(Section):
    """How old the weights behind a trained token may be."""

    bound: int = Field(2, ge=0, description="largest allowed learner version minus version of the oldest token (S)")
    mode: Literal["wait", "drop"] = Field(
        "wait", description="slots alone (wait), or also drop what is too old at take"
    )
    window: float = Field(1.0, gt=0.0, le=1.0, description="share of the (S+1)*P slots among which take may reorder")


class QueueConfig(Section):
    """The durable replay queue."""

    durability: Literal["memory", "os", "fsync"] = Field("fsync", description="what an acknowledged submit survives")
    lease_s: float = Field(120.0, gt=0, description="a lease without heartbeat for this long is given to another actor")
    group_deadline_s: float = Field(600.0, gt=0, description="a group older than this since its first lease is dropped")
    max_attempts: int = Field(3, ge=1, description="leases of one ordinal before it is dropped as poison")
    min_viable: int = Field(2, ge=1, description="scored trajectories a group needs to be trained on")
    max_bytes: int = Field(2 << 30, gt=0, description="payload bytes held before submits are pushed back")
    retain: Annotated[int, Field(ge=0)] | Literal["all"] = Field(
        0, description="committed steps whose groups stay in the journal for offline use, or all"
    )


class WeightsConfig(Section):
    """How new weights reach the engines."""

    plane: Literal["auto", "nccl", "gloo", "ipc", "store"] = Field("auto", description="the path that weights take")
    store_url: str = Field(
        "", description="where plane store keeps versions, a directory or any fsspec URL; empty: the run directory"
    )
    lora: Literal["auto", "adapter", "merged"] = Field(
        "auto",
        description="what travels when adapters are trained: the adapter alone, or all weights with it merged in",
    )
    bucket_mb: int = Field(8, ge=1, description="bytes under way at once, per side: two buckets of this many MB")
    timeout_s: float = Field(60.0, gt=0, description="deadline of every collective and call of one update")
    kv_policy: Literal["keep", "recompute", "salt"] = Field(
        "salt", description="what happens to cached KV of old weights"
    )
    canary_every: int = Field(1, ge=0, description="commits between canary checks; 0 turns the canary off")
    canary_tolerance: float = Field(0.15, gt=0, description="mean abs log-prob difference that raises the alarm")
