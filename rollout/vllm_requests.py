"""Our requests in vLLM's words, and its answers in ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rollout.engine import Completion, SamplingParams
from rollout.errors import ConfigError, EngineError
from rollout.types import Status
from rollout.versions import VersionSpan

INITIAL_VERSION = "default"  # what vLLM calls the weights of the model directory
ADAPTER_ID = 1
_NO_FILE = "/proc/headrace/adapters-never-come-from-disk"  # vLLM would read it if the adapter were ever missing


def to_generate(sampling: SamplingParams, n: int) -> Any:
    """vLLM's SamplingParams for n answers with the log-prob of each token."""
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind

    return VllmSampling(
        n=n,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=list(sampling.stop) or None,
        seed=sampling.seed,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def to_score(temperature: float) -> Any:
    """vLLM's SamplingParams for the log-probs of given tokens; only at temperature 1.

    vLLM gives prompt tokens the log-probs of the unscaled distribution, so another temperature cannot be had from it;
    the canary compares weights, for which 1 is as good as any.
    """
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind

    if temperature != 1.0:
        raise ConfigError(f"score: temperature {temperature} is not offered by vLLM for given tokens; use 1.0")
    return VllmSampling(max_tokens=1, temperature=0.0, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)


def the_adapter() -> Any:
    """The LoRARequest of the one adapter an engine has (rollout/vllm_adapter.py puts it there)."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_ID, _NO_FILE)


def check_room(n_prompt: int, max_tokens: int, room: int) -> None:
    """ConfigError unless there is a prompt and it fits the context together with its answer."""
    if n_prompt == 0 or n_prompt + max_tokens > room:
        raise ConfigError(
            f"a prompt of {n_prompt} tokens with max_tokens {max_tokens} does not fit a context of {room}; "
            "shorten one of them or raise the context"
        )


def completion(output: Any, initial_version: int) -> Completion:
    """vLLM's CompletionOutput as ours. A request that vLLM aborted has no trainable token."""
    tokens = np.array(list(output.token_ids), dtype=np.int32)
    if output.finish_reason not in ("stop", "length") or len(tokens) == 0:
        return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), Status.FAILED, "")
    logprobs = np.array([row[int(t)].logprob for row, t in zip(output.logprobs, tokens, strict=True)], np.float32)
    spans = tuple(
        VersionSpan(initial_version if s.version == INITIAL_VERSION else int(s.version), s.start, s.end)
        for s in output.weight_versions or ()
    )
    status = Status.FINISHED if output.finish_reason == "stop" else Status.TRUNCATED
    return Completion(tokens, logprobs, spans, status, output.text)


@contextmanager
def death_named(during: str) -> Iterator[None]:
    """vLLM's "engine dead" as our error, which pickles and says what to do."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineError(f"vLLM's engine process died during {during}; restart the engine") from error
