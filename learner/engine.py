"""The learner: groups in, one optimizer step, new weights out. The only file that knows DeepSpeed.

    train_step(groups, step)     learner/train_step.py walks it; this file gives it forward, backward and step
      forward, backward          DeepSpeed engine over PolicyModule (ZeRO 0-3, bf16 / fp16 / fp32, offload)
      step                       clip -> AdamW on float32 master weights -> compute weights; version v -> v + 1
    state_tensors()              (Hugging Face name, tensor in the serving type), one alive at a time
    score(prompt, answer)        the canary's oracle
    save_checkpoint, load_checkpoint, export_hf

Every method is collective: all ranks of the learner call it, in the same order.
A gradient that is not finite never reaches the weights: the step is skipped, named, and after
`max_bad_steps` in a row LearnerStopped is raised.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from learner import checkpoint, export
from learner import train_step as walk
from learner.choices import Choices
from learner.config import AlgorithmConfig, LearnerConfig
from learner.packing import Answer, pack
from learner.policy import DTYPES, Inputs, PolicyOutput, layout_of, load_policy
from learner.schedule import learning_rate
from learner.weights import named_weights
from learner.world import World
from rollout.errors import ConfigError, DivergedError
from rollout.types import Float32, Group

ADAM_STATES = ("exp_avg", "exp_avg_sq")


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
        component_names: Sequence[str] = (),
    ) -> None:
        self.model_dir, self.choices, self.algorithm, self.config = Path(model_dir), choices, algorithm, learner
        self.temperature, self.total_steps = temperature, total_steps
        self.serving_dtype = DTYPES[serving_dtype]
        self.layout = layout_of(learner)
        _refuse_half_precision_alone(learner)
        self.world = World.join(device, learner.timeout_s)
        self.device = self.world.device
        self.max_tokens, self.component_names = max_tokens, tuple(component_names)
        self.version = 0
        self.skipped_ordinals: tuple[int, ...] = ()  # of the last step: the groups whose gradient was not finite
        self.adam_steps = 0  # optimizer steps that really changed the weights; skipped ones do not count
        self.bad_steps = 0
        torch.manual_seed(seed)
        self.policy = load_policy(model_dir, learner, self.device)
        self._adam, self._ds = self._start_deepspeed()

    # ---- start -------------------------------------------------------------------------------------------------

    def _start_deepspeed(self) -> tuple[torch.optim.Optimizer, Any]:
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if self.device.type == "cuda" else "cpu")
        os.environ.setdefault("LOCAL_RANK", "0")  # else DeepSpeed looks for MPI
        import deepspeed

        deepspeed.utils.logger.setLevel("WARNING")
        # Compiled with g++ at first use (40 s) for inference kernels that training never calls.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
        wanted = [p for p in self.policy.parameters() if p.requires_grad]
        adam = torch.optim.AdamW(
            wanted,
            lr=self.algorithm.learning_rate,
            betas=self.algorithm.betas,
            weight_decay=self.algorithm.weight_decay,
            fused=not self.config.offload_optimizer or self.device.type == "cpu",
        )
        engine, *_ = deepspeed.initialize(model=self.policy, optimizer=adam, config=self._deepspeed_config())
        return adam, engine

    def _deepspeed_config(self) -> dict[str, Any]:
        c = self.config
        zero: dict[str, Any] = {"stage": c.zero_stage, "overlap_comm": self.device.type == "cuda"}
        if c.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        if c.offload_params:
            zero["offload_param"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,  # micro-batches vary from step to step: the boundary is set by hand
            "gradient_clipping": self.algorithm.grad_clip,
            "zero_optimization": zero,
            "bf16": {"enabled": c.compute_dtype == "bfloat16", "check_grad_overflow": True},
            "fp16": {"enabled": c.compute_dtype == "float16", "initial_scale_power": 12},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            "memory_breakdown": False,
        }

    # ---- what the walk of a step needs (learner.train_step.Updater) -----------------------------------------------

    def forward(self, inputs: Inputs) -> PolicyOutput:
        return self._ds(inputs, self.temperature)

    def look_reference(self, inputs: Inputs) -> Tensor | None:
        return None

    def look(self, inputs: Inputs) -> PolicyOutput:
        """A forward pass without gradient."""
        with torch.no_grad():
            return self.policy(inputs, self.temperature)

    def backward(self, loss: Tensor, last: bool) -> None:
        """DeepSpeed averages over ranks; our denominators are global already, hence the factor."""
        self._ds.set_gradient_accumulation_boundary(last)
        self._ds.backward(loss * self.world.size)

    def step(self) -> walk.Stepped:
        """Clip, update, and say what happened. A non-finite gradient leaves weights and moments as they were."""
        rate = learning_rate(self.algorithm, self.version, self.total_steps)
        for group in self._adam.param_groups:
            group["lr"] = rate
        norm = self._plain_norm() if self._plain else math.nan
        if self._plain and not math.isfinite(norm):
            self._ds.zero_grad()
            return walk.Stepped(norm, rate, applied=False)
        self._ds.step()
        if not self._plain:
            norm = float(self._ds.get_global_grad_norm() or 0.0)
        applied = math.isfinite(norm) and not getattr(self._ds.optimizer, "overflow", False)
        self.adam_steps += int(applied)
        return walk.Stepped(norm, rate, applied)

    @property
    def _plain(self) -> bool:
        """Without ZeRO (float32 only) DeepSpeed leaves the parameters and the optimizer as they are."""
        return self.config.zero_stage == 0

    def _plain_norm(self) -> float:
        """Without ZeRO nobody else computes it before the update."""
        grads = [p.grad for p in self.policy.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    # ---- public ------------------------------------------------------------------------------------------------

    def train_step(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """One optimizer step on this rank's share of the groups; afterwards `version` is `step + 1`.

        Raises DivergedError after `max_bad_steps` steps in a row whose gradient was not finite.
        """
        report = walk.run(self, groups)
        self.version = step + 1
        self.skipped_ordinals = report.suspects
        self.bad_steps = 0 if report.applied else self.bad_steps + 1
        if self.bad_steps >= self.config.max_bad_steps:
            raise DivergedError(
                f"the gradient was not finite in {self.bad_steps} steps in a row, last at step {step} with the groups "
                f"{list(report.suspects)}; lower algorithm.learning_rate or look at these ordinals"
            )
        return report.metrics

    def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float | None = None) -> Float32:
        """Log-probs float32[L] of an answer under the present weights, at `temperature`."""
        n = len(token_ids)
        prompt, tokens = np.asarray(prompt_ids, np.int32), np.asarray(token_ids, np.int32)
        answer = Answer(0, 0, 0, prompt, tokens, np.ones(n, bool))
        (batch,) = pack([answer], token_budget=1 << 30, layout=self.layout)
        with torch.no_grad():
            out = self.policy(Inputs.of(batch, self.device), self.temperature if temperature is None else temperature)
        return out.logprobs.float().cpu().numpy()

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, in the serving type, adapters merged.

        Under ZeRO-3 a tensor is gathered while the consumer has it; what is yielded is a copy, so that it stays valid
        after the gather is let go.
        """
        for weight in named_weights(self.policy):
            with self._gathered(weight.params):
                tensor = weight.whole().to(self.serving_dtype)
                yield weight.name, tensor.clone() if self.config.zero_stage == 3 else tensor

    def _gathered(self, params: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        if self.config.zero_stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(params))

    def export_hf(self, out: str | Path) -> None:
        """A directory that transformers and vLLM load: the weights in the serving type, the tokenizer and the rest."""
        named = self.state_tensors()
        if self.world.rank == 0:
            export.write(Path(out), self.model_dir, named, str(self.serving_dtype).removeprefix("torch."))
        else:
            for _ in named:
                pass

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: str | Path) -> None:
        """All that a learner needs to go on: master weights, moments, random states, counters. Durable on return."""
        numbers = {"adam_steps": float(self.adam_steps), "bad_steps": float(self.bad_steps)}
        checkpoint.write(Path(path), self._full_state(), self.version, numbers, writes=self.world.rank == 0)
        self.world.meet()

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from a checkpoint of any number of ranks and any ZeRO stage. Raises TornCheckpoint."""
        root = Path(path)
        manifest = checkpoint.read_manifest(root, digests=self.world.rank == 0)
        self.adam_steps = int(manifest.numbers["adam_steps"])
        self.version, self.bad_steps = manifest.version, int(manifest.numbers["bad_steps"])
        if self.adam_steps:
            self._make_moments()
        params = dict(self._trained())
        for key, tensor in checkpoint.tensors(root, manifest):
            kind, _, name = key.partition("/")
            if kind == "rng":
                if int(name) == self.world.rank:
                    torch.set_rng_state(tensor)
            else:
                self._restore(params[name], kind, tensor.to(self.device))
        for state in self._adam.state.values():
            state["step"].fill_(self.adam_steps)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((n, p) for n, p in self.policy.named_parameters() if p.requires_grad)

    def _full_state(self) -> Iterator[tuple[str, Tensor]]:
        """`master/<name>`, `exp_avg/<name>`, `exp_avg_sq/<name>` whole in float32, and `rng/<rank>`."""
        for name, param in self._trained():
            for kind in ("master", *(ADAM_STATES if self.adam_steps else ())):
                yield f"{kind}/{name}", self._full(param, kind)
        states = self.world.gather(torch.get_rng_state())
        yield from ((f"rng/{rank}", state) for rank, state in enumerate(states))

    def _full(self, param: nn.Parameter, kind: str) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self._plain:
            return param.detach() if kind == "master" else self._adam.state[param][kind]
        whole = safe_get_full_fp32_param(param) if kind == "master" else safe_get_full_optimizer_state(param, kind)
        if whole is None:
            raise RuntimeError(f"DeepSpeed has no {kind} of a parameter of shape {tuple(param.shape)}")
        return whole.detach()

    def _restore(self, param: nn.Parameter, kind: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        with torch.no_grad():
            if kind != "master":
                if self._plain:
                    self._adam.state[param][kind].copy_(whole)
                else:
                    safe_set_full_optimizer_state(param, whole, kind)
                return
            if not self._plain:
                safe_set_full_fp32_param(param, whole)
            with self._modified(param):
                param.copy_(whole)

    def _modified(self, param: nn.Parameter) -> AbstractContextManager[Any]:
        if self.config.zero_stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([param], modifier_rank=0)

    def _make_moments(self) -> None:
        """Adam's moments exist only after a step: take one of rate 0 on a gradient of 0, then overwrite what it wrote."""
        empty = pack([], token_budget=1, layout=self.layout, at_least=1)[0]
        out = self.forward(Inputs.of(empty, self.device))
        self.backward(out.logprobs.sum(), last=True)
        for group in self._adam.param_groups:
            group["lr"] = 0.0
        self._ds.step()


def _refuse_half_precision_alone(c: LearnerConfig) -> None:
    if c.zero_stage == 0 and c.compute_dtype != "float32":
        raise ConfigError(
            f"topology.learner.zero_stage is 0 with compute_dtype {c.compute_dtype!r}: DeepSpeed adds up micro-batches "
            "in half precision there; use zero_stage 1 (on one rank it costs nothing) or compute_dtype float32"
        )
