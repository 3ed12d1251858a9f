"""One module and its AdamW under DeepSpeed, ZeRO 0 to 3. The only file that knows DeepSpeed.

forward, backward      a micro-batch; the last one of an update says so
step                   clip -> AdamW on float32 masters -> compute weights; not finite: nothing changes
read, write            a parameter's master weights and moments, whole, whatever the stage: checkpoints
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learner.config import AlgorithmConfig, LearnerConfig
from learner.look import Stepped
from learner.zero_config import deepspeed_config


class Zero:
    """One module and its AdamW under DeepSpeed. Parameters, masters and moments can be read and written whole."""

    MOMENTS = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, module: nn.Module, algorithm: AlgorithmConfig, config: LearnerConfig, device: torch.device
    ) -> None:
        self.module, self.stage, self.clip = module, config.zero_stage, algorithm.grad_clip
        self.steps = 0  # updates that really changed the weights; skipped ones do not count
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if device.type == "cuda" else "cpu")
        os.environ.setdefault("LOCAL_RANK", "0")  # else DeepSpeed looks for MPI
        import deepspeed

        deepspeed.utils.logger.setLevel("ERROR")
        # Compiled with g++ at first use (40 s) for inference kernels that training never calls.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
        self.adam = torch.optim.AdamW(
            [p for _, p in self.trained()],
            lr=algorithm.learning_rate,
            betas=algorithm.betas,
            weight_decay=algorithm.weight_decay,
            fused=True,
        )
        settings = deepspeed_config(algorithm, config, device)
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=self.adam, config=settings)
        self._world = dist.get_world_size()
        if self._engine.fp16_enabled():  # at its smallest scale it would raise; the caller counts such steps
            self._engine.optimizer.loss_scaler.raise_error_at_min_scale = False

    def forward(self, *args: Any) -> Any:
        return self._engine(*args)

    def backward(self, loss: Tensor, last: bool) -> None:
        """DeepSpeed averages over ranks; our denominators are global already, hence the factor."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._world)

    def step(self, rate: float) -> Stepped:
        """Clip, update, and say what happened. A non-finite gradient leaves weights and moments as they were."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        if self.stage == 0:
            norm = self._local_norm()
            if not math.isfinite(norm):
                self._engine.zero_grad()
                return Stepped(norm, rate, applied=False)
        scale = self._loss_scale()
        self._engine.step()
        if self.stage:
            norm = float(self._engine.get_global_grad_norm() or 0.0)
        applied = math.isfinite(norm) and not getattr(self._engine.optimizer, "overflow", False)
        self.steps += int(applied)
        return Stepped(norm, rate, applied, rescaled=not applied and self._loss_scale() < scale)

    def _loss_scale(self) -> float:
        """What fp16 multiplies losses with; elsewhere 1."""
        return float(self._engine.optimizer.loss_scale) if self._engine.fp16_enabled() else 1.0

    def _local_norm(self) -> float:
        """Without ZeRO nobody else computes it before the update; gradients are the same on every rank by then."""
        grads = [p.grad for _, p in self.trained() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)

    def gathered(self, params: Sequence[nn.Parameter], *, modified: bool = False) -> AbstractContextManager[Any]:
        """Inside, the parameters are whole on every rank; with `modified`, rank 0's changes are kept."""
        if self.stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(params), modifier_rank=0 if modified else None)

    def read(self, param: nn.Parameter, kind: str) -> Tensor:
        """The whole float32 master ("master") or moment of a parameter, on every rank."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.stage == 0:
            return param.detach() if kind == "master" else self.adam.state[param][kind]
        whole = safe_get_full_fp32_param(param) if kind == "master" else safe_get_full_optimizer_state(param, kind)
        if whole is None:
            raise RuntimeError(f"DeepSpeed has no {kind} of a parameter of shape {tuple(param.shape)}")
        return whole.detach()

    def write(self, param: nn.Parameter, kind: str, whole: Tensor) -> None:
        """The inverse of `read`; moments must have been made by `make_moments`."""
        if kind != "master" and self.stage == 0:
            self.adam.state[param][kind].copy_(whole)
        elif self.stage:
            self._write_shared(param, kind, whole)
        if kind == "master":
            with torch.no_grad(), self.gathered([param], modified=True):
                param.copy_(whole)

    def _write_shared(self, param: nn.Parameter, kind: str, whole: Tensor) -> None:
        from deepspeed import utils

        if self.stage < 3:
            if kind == "master":
                utils.safe_set_full_fp32_param(param, whole)
            else:
                utils.safe_set_full_optimizer_state(param, whole, kind)
            return
        # Not the `full` forms: they fail where a parameter has fewer elements than its shares together (0.19.8).
        n = param.ds_tensor.numel()
        padded = nn.functional.pad(whole.flatten(), (0, n * self._world - whole.numel()))
        mine = padded[dist.get_rank() * n :][:n]
        if kind == "master":
            utils.safe_set_local_fp32_param(param, mine)
        else:
            utils.safe_set_local_optimizer_state(param, mine, kind)

    def make_moments(self, nothing: Callable[[], Tensor], steps: int) -> None:
        """Adam's moments exist only after a step: take one of rate 0 on a gradient of 0, then set the step count."""
        if steps:
            self.backward(nothing(), last=True)
            self.step(0.0)
        self.steps = steps
        for state in self.adam.state.values():
            state["step"].fill_(steps)
