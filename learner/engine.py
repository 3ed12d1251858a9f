"""The learner: groups in, one optimizer step, new weights out.

    LearnerEngine.train_step(groups, step)     learner/train_step.py walks it and calls back
        forward, backward, step                zero.py: one module under ZeRO 0-3, bf16 / fp16 / fp32, offload
    state_tensors()                            (Hugging Face name, tensor in the serving type), one alive at a time
    score(prompt, answer)                      the canary's oracle
    save_checkpoint, load_checkpoint           learner/snapshot.py, learner/checkpoint.py
    export_hf                                  learner/export.py

Every method but `score` outside ZeRO-3 is collective: all ranks of the learner call it, in the same order.
A gradient that is not finite never reaches the weights: the step is skipped and its ordinals are named, and after
`max_bad_steps` such steps in a row DivergedError ends the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from learner import export, heap, online_pairs, reference, snapshot, train_step
from learner.choices import Choices
from learner.config import AlgorithmConfig, LearnerConfig
from learner.critic import CriticModule, ValueHead
from learner.look import Stepped
from learner.packing import Answer, pack
from learner.policy import DTYPES, Inputs, PolicyOutput, layout_of, load_policy
from learner.schedule import learning_rate
from learner.weights import NamedWeight, adapter_weights, base_weights, named_weights
from learner.world import World
from learner.zero import Zero
from learner.zero_config import refuse_what_cannot_be_kept
from rollout.errors import DivergedError
from rollout.types import Float32, Group
from rollout.versions import AdapterSpec
from rollout.weight_adapter import base_root


class LearnerEngine:
    """One rank of the learner. See the map above."""

    def __init__(
        self,
        model_dir: str | Path,
        choices: Choices,
        algorithm: AlgorithmConfig,
        learner: LearnerConfig,
        device: str = "cpu",
        seed: int = 0,
        *,
        temperature: float = 1.0,
        serving_dtype: str = "bfloat16",
        total_steps: int | None = None,
        max_tokens: int | None = None,
        component_weights: Mapping[str, float] | None = None,
    ) -> None:
        """`temperature`, `max_tokens`: those of sampling; `component_weights`: the rewards' names and weights."""
        refuse_what_cannot_be_kept(learner, choices, component_weights)
        self.model_dir, self.choices, self.algorithm, self.config = Path(model_dir), choices, algorithm, learner
        self.temperature, self.total_steps, self.max_tokens = temperature, total_steps, max_tokens
        self.serving_dtype, self.component_names = DTYPES[serving_dtype], tuple(component_weights or ())
        self.component_weights = torch.tensor(list((component_weights or {}).values()), dtype=torch.float64)
        self.layout = layout_of(learner)
        self.world = World.join(device, learner.timeout_s)
        self.world.check(learner.ranks)
        self.version = 0
        self.bad_steps = 0  # in a row
        self.skipped_ordinals: tuple[int, ...] = ()  # of the last step: the groups whose gradient was not finite
        self.before_update: Callable[[], None] = lambda: None  # called when the weights are about to change
        if self.device.type == "cpu":
            heap.keep()
        torch.manual_seed(seed)
        self.kl_coef = choices.kl_coef
        self.policy = load_policy(model_dir, learner, self.device)
        self.reference = None
        if choices.needs_reference:
            self.reference = reference.build(self.policy, model_dir, learner, self.device)
        self.critic = self._add_critic() if choices.needs_critic else None
        self.zero = Zero(self.policy, algorithm, learner, self.device)

    @property
    def device(self) -> torch.device:
        return self.world.device

    def _add_critic(self) -> Zero | None:
        """A trunk of its own under its own optimizer, or (None) a head on the policy's trunk."""
        if self.config.critic == "own":
            c, algorithm = self.choices, self.algorithm
            settings = {
                "learning_rate": c.critic_learning_rate,
                "weight_decay": algorithm.weight_decay if c.critic_weight_decay is None else c.critic_weight_decay,
                "grad_clip": c.critic_grad_clip or algorithm.grad_clip,
            }
            module = CriticModule(self.model_dir, self.config, self.device)
            return Zero(module, algorithm.model_copy(update=settings), self.config, self.device)
        self.policy.value_head = ValueHead(self.policy.width).to(self.device)
        return None

    # ---- what the walk of a step calls (learner.train_step.Updater) -------------------------------------------------

    def forward(self, inputs: Inputs) -> PolicyOutput:
        return self.zero.forward(inputs, self.temperature)

    def look(self, inputs: Inputs) -> PolicyOutput:
        """A forward pass without gradient."""
        with torch.no_grad():
            return self.policy(inputs, self.temperature)

    def look_values(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The critic's values [N] and after [B], without gradient."""
        if self.critic is None:
            out = self.look(inputs)
            assert out.values is not None and out.after is not None
            return out.values, out.after
        with torch.no_grad():
            return self.critic.module(inputs)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.zero.backward(loss, last)

    def step(self) -> Stepped:
        """Policy and critic go together: the critic follows its own rate with the policy's warm-up and schedule."""
        self.before_update()
        rate = learning_rate(self.algorithm, self.version, self.total_steps)
        stepped = self.zero.step(rate)
        if self.critic is not None:
            own = self.critic.step(rate * self.choices.critic_learning_rate / self.algorithm.learning_rate)
            failed = [turn for turn in (stepped, own) if not turn.applied]
            rescaled = bool(failed) and all(turn.rescaled for turn in failed)
            stepped = Stepped(stepped.grad_norm, rate, not failed, rescaled)
        return stepped

    # ---- public -----------------------------------------------------------------------------------------------------

    def train_step(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """One step (algorithm.updates turns of the optimizer) on this rank's share of the groups, together with the
        other ranks; then `version` is `step + 1`. Raises DivergedError.
        """
        walk = train_step if self.choices.objective == "policy" else online_pairs
        report = walk.run(self, groups)
        self.version = step + 1
        if isinstance(self.reference, reference.Copy) and self.reference.is_due(self.version):
            self.reference.take_over(self.state_tensors())
        self.skipped_ordinals = report.suspects
        if report.applied or report.bad:  # one that only lowered fp16's loss scale says nothing
            self.bad_steps = self.bad_steps + 1 if report.bad else 0
        if self.bad_steps >= self.config.max_bad_steps:
            raise DivergedError(
                f"the gradient was not finite in {self.bad_steps} steps in a row, last at step {step} with the groups "
                f"{list(report.suspects)}; lower algorithm.learning_rate or look at these ordinals"
            )
        return report.metrics

    def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float | None = None) -> Float32:
        """Log-probs float32[L] of an answer under the present weights, at `temperature` (default: that of sampling)."""
        prompt, tokens = np.asarray(prompt_ids, np.int32), np.asarray(token_ids, np.int32)
        answer = Answer(0, 0, 0, prompt, tokens, np.ones(len(tokens), bool))
        (batch,) = pack([answer], token_budget=1 << 30, layout=self.layout)
        with torch.no_grad():
            heat = self.temperature if temperature is None else temperature
            out = self.policy(Inputs.of(batch, self.world.device), heat)
        return out.logprobs.float().cpu().numpy()

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, in the serving type, adapters merged.

        Under ZeRO-3 a tensor is gathered while the consumer has it; what is yielded is a copy, so that it stays valid
        after the gather is let go. Otherwise it may be the weight itself: it changes at the next `train_step`.
        """
        yield from self._stream(named_weights(self.policy))

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters alone, under peft's names; like `state_tensors` otherwise."""
        yield from self._stream(adapter_weights(self.policy))

    def adapter_spec(self) -> AdapterSpec:
        """What the adapters are added to, and how: reads the whole base once, for its digest."""
        base = base_root(self._stream(base_weights(self.policy)))
        return AdapterSpec(self.config.lora_rank, self.config.lora_alpha, base)

    def _stream(self, named: Iterator[NamedWeight]) -> Iterator[tuple[str, Tensor]]:
        for weight in named:
            with self.zero.gathered(weight.params):
                tensor = weight.whole().to(self.serving_dtype)
                yield weight.name, tensor.clone() if self.config.zero_stage == 3 else tensor

    def save_checkpoint(self, path: str | Path) -> None:
        """All that a learner needs to go on: master weights, moments, random states, counters. Durable on return."""
        snapshot.save(self, Path(path))

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from a checkpoint of any number of ranks and any ZeRO stage. Raises TornCheckpoint."""
        snapshot.load(self, Path(path))

    def export_hf(self, out: str | Path) -> None:
        """A directory that transformers and vLLM load: the weights in the serving type, the tokenizer and the rest."""
        named = self.state_tensors()
        if self.world.rank == 0:
            export.write(Path(out), self.model_dir, named, str(self.serving_dtype).removeprefix("torch."))
        deque(named, maxlen=0)  # the other ranks walk along: a gather needs all of them
        self.world.meet()
