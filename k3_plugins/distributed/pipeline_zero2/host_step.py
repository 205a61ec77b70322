"""The optimizer step in host memory: master weights, moments and gradient shards never go to the device.

Megatron's clipping asserts CUDA gradients and its norm and unscaling kernels want them, so those are done here. What
stays Megatron's: the update of the model's parameters from the master weights, zero counting, the reductions over ranks
and the state dict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, overload

import torch
from megatron.core.optimizer import distrib_optimizer

from k3_plugins.compat.optional import require
from k3_plugins.distributed.pipeline_zero2.clip import IN_HOST_MEMORY
from k3_plugins.feature import FeatureError


def move_to_host(optimizer: Any, kernel: str, gradients: Iterable[torch.Tensor]) -> None:
    """Move one distributed optimizer's master weights to host memory and give it an AdamW that steps there.

    Args:
        optimizer: Megatron's DistributedOptimizer around an Adam, before its first step and before a checkpoint is
            loaded.
        kernel: 'torch' or 'deepspeed'.
        gradients: the memory the gradients will lie in.

    Raises:
        FeatureError: if DeepSpeed is asked for and missing, or the optimizer is Adam with coupled weight decay.
        RuntimeError: for an optimizer that was moved already, or has moments, which would be lost.
    """
    if isinstance(optimizer.optimizer, HostAdamW):
        raise RuntimeError("the optimizer steps in host memory already: it can be moved there once")
    if optimizer.optimizer is not None and optimizer.optimizer.state:
        raise RuntimeError("the optimizer has made a step or loaded its state: move it to host memory before that")
    if not optimizer.config.decoupled_weight_decay:
        raise FeatureError("--zero2-optimizer-device cpu steps with AdamW; the optimizer couples weight decay (Adam)")
    IN_HOST_MEMORY.gradients.update(tensor.untyped_storage().data_ptr() for tensor in gradients)
    if optimizer.is_stub_optimizer:
        return
    for group in optimizer.optimizer.param_groups:
        for main_param in group["params"]:
            # For an fp32 model the master weight is a view of the model's parameter: it becomes a copy.
            host = torch.empty(main_param.shape, dtype=torch.float32, pin_memory=torch.cuda.is_available())
            main_param.data = host.copy_(main_param.detach())
            IN_HOST_MEMORY.params.add(id(main_param))
    old = optimizer.optimizer
    optimizer.optimizer = HostAdamW(old.param_groups, old.defaults, kernel)
    optimizer._unscale_main_grads_and_check_for_nan = functools.partial(_unscale, optimizer)


class HostAdamW(torch.optim.AdamW):
    """AdamW on fp32 tensors in host memory, with the state and the step counts of Megatron's optimizers.

    torch's Adam counts steps per parameter, Transformer Engine's and apex's per group. Megatron's checkpoint code wants
    the count where the installed packages keep it, and stumbles over a second one.

    Args:
        param_groups: with lr, weight_decay and Megatron's own entries.
        defaults: of the optimizer that this one replaces.
        kernel: 'torch': the fused CPU kernel. 'deepspeed': CPUAdam.
    """

    def __init__(self, param_groups: list[dict], defaults: dict, kernel: str):
        hyper = {name: defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        # Megatron's fp32 shards are views of parameters, which torch's constructor refuses.
        super().__init__([torch.empty(0)], **hyper, fused=True)
        self.param_groups = param_groups
        for group in param_groups:
            # The groups come with the replaced optimizer's settings, which would go before the new defaults.
            group.update({name: value for name, value in self.defaults.items() if name not in hyper})
        self._deepspeed = _DeepSpeedAdam(hyper) if kernel == "deepspeed" else None

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> NoReturn: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update from `.grad`."""
        if closure is not None:
            raise RuntimeError("HostAdamW takes no closure")
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "exp_avg" not in state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                if "step" not in state:
                    state["step"] = torch.tensor(float(group.get("step") or 0))
        if self._deepspeed is None:
            super().step()
        else:
            for group in self.param_groups:
                for param in group["params"]:
                    self._deepspeed.update(param, self.state[param], group)
        for group in self.param_groups:
            if group["params"]:
                group["step"] = int(self.state[group["params"][0]]["step"].item())
            if distrib_optimizer.HAVE_APEX_OR_TE:
                for param in group["params"]:
                    del self.state[param]["step"]


class _DeepSpeedAdam:
    """DeepSpeed's compiled kernel, without its Python optimizer, whose state Megatron's checkpoints do not fit."""

    _ids = iter(range(1_000_000, 2_000_000))

    def __init__(self, hyper: dict):
        require("deepspeed", "--zero2-cpu-adam deepspeed")
        from deepspeed.ops.op_builder import CPUAdamBuilder

        self._ops = CPUAdamBuilder().load()
        self._id = next(self._ids)
        adam_w_mode, log = True, False
        self._ops.create_adam(
            self._id, hyper["lr"], *hyper["betas"], hyper["eps"], hyper["weight_decay"], adam_w_mode, log
        )

    def update(self, param: torch.Tensor, state: dict, group: dict) -> None:
        state["step"] += 1
        step, bias_correction = int(state["step"].item()), True
        hyper = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
        moments = state["exp_avg"], state["exp_avg_sq"]
        self._ops.adam_update(self._id, step, *hyper, bias_correction, param.data, param.grad, *moments)


def _unscale(optimizer: Any) -> bool:
    """`_unscale_main_grads_and_check_for_nan`: True if any rank found a non-finite gradient."""
    inverse, finite = float(optimizer.grad_scaler.inv_scale), True
    for group in optimizer.optimizer.param_groups:
        for param in group["params"]:
            finite = finite and bool(torch.isfinite(param.grad).all())
            param.grad.mul_(inverse)
    optimizer.found_inf.fill_(0.0 if finite else 1.0)
    torch.distributed.all_reduce(
        optimizer.found_inf, op=torch.distributed.ReduceOp.MAX, group=optimizer.get_grad_stats_parallel_group()
    )
    return optimizer.found_inf.item() > 0
