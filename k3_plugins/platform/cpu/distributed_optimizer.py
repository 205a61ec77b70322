"""Resume of Megatron's distributed optimizer with torch's Adam.

Megatron's state-dict code is written for the Adam of Transformer Engine or apex, which counts steps once per
parameter group. torch's Adam keeps a 0-dim tensor `step` with every parameter. With it, Megatron-Core 0.19.2

1. cannot resume: `state_dict()` reads the step of an optimizer that has not stepped yet and asserts
   (`assert len(steps) == 1`);
2. past that, overwrites the restored step with the 0 of the freshly allocated state (`dp_reshardable`), or
   fails on the missing key (`fully_reshardable`): bias correction starts again and the run diverges without a
   message;
3. gives all parameters one and the same `step` tensor, which each of them then increments;
4. in `dp_reshardable`, copies into parameters while autograd records, which torch refuses for fp32 parameters (their
   main copy is a view of the parameter itself).

The repairs below allocate torch's state before it is read, keep the step out of the per-parameter copies (the
checkpoint has it in the parameter groups), and give each parameter its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def repair(module: Any) -> None:
    """Wrap the three methods of DistributedOptimizer that handle `step`."""
    cls = module.DistributedOptimizer
    cls.state_dict = _wrap_state_dict(cls.state_dict)
    cls.load_state_dict = _wrap_load_state_dict(cls.load_state_dict)
    cls._set_main_param_and_optimizer_states = _wrap_set_states(cls._set_main_param_and_optimizer_states)


def _torch_adam(optimizer: Any) -> bool:
    """True for the plain torch Adam; Megatron's HybridDeviceOptimizer, whose steps Megatron handles, is none."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))


def _wrap_state_dict(original: Any) -> Any:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if _torch_adam(self.optimizer):
            _allocate_state(self)
        return original(self)

    return state_dict


def _allocate_state(dist_optimizer: Any) -> None:
    """What torch's Adam allocates in its first step, for parameters that have no state yet. step 0: not stepped."""
    optimizer = dist_optimizer.optimizer
    missing = [p for group in optimizer.param_groups for p in group["params"] if not optimizer.state[p]]
    if not missing:
        return
    dist_optimizer.init_state_fn(optimizer, dist_optimizer.config)
    for p in missing:
        optimizer.state[p]["step"] = torch.tensor(0.0, dtype=torch.float32)


def _wrap_load_state_dict(original: Any) -> Any:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        if _torch_adam(self.optimizer):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    return load_state_dict


def _wrap_set_states(original: Any) -> Any:
    @functools.wraps(original)
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> Any:
        if _torch_adam(self.optimizer):
            group_index, group_order = self.model_param_group_index_map[model_param]
            main_param = self.optimizer.param_groups[group_index]["params"][group_order]
            # The method copies every tensor of the state; a copy of the step onto itself changes nothing.
            tensors = {**tensors, "step": self.optimizer.state[main_param]["step"]}
        with torch.no_grad():
            return original(self, model_param, tensors)

    return _set_main_param_and_optimizer_states
