"""Megatron's optimizers around `PerHeadMuon`, and the function that builds them.

With the distributed optimizer, gradients, fp32 weights and momentum stay sharded: the one change to Megatron's class is
what it saves and loads. Checkpoints keep AdamW's keys for every parameter (Megatron's formats want the same keys
everywhere); the second moment of a matrix is written as zeros and never held in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import ConstantGradScaler
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    param_group_identifier_keys,
)
from megatron.core.process_groups_config import ProcessGroupCollection

from k3_plugins.feature import FeatureError
from k3_plugins.optimizer.per_head_muon.layout import ChunkLayout, Grid, bind, buffer_layout
from k3_plugins.optimizer.per_head_muon.optimizer import ADAMW, MUON, PerHeadMuon
from k3_plugins.optimizer.per_head_muon.settings import MuonSettings
from k3_plugins.optimizer.per_head_muon.table import Entry, build_table

Groups = list[dict[str, Any]]


class PerHeadMuonDistributedOptimizer(DistributedOptimizer):
    """`DistributedOptimizer` over a `PerHeadMuon`. Call `bind_muon` once it is built.

    Where gradients come from and where the fp32 shards live is still the base class's business:
    ``_copy_model_grads_to_main_grads`` sets ``grad`` of the shards, ``_copy_main_params_to_model_params`` writes back.
    """

    table: Mapping[Any, Entry]

    def bind_muon(self, table: Mapping[Any, Entry], tensor_group: Any, device: torch.device | None = None) -> None:
        """Plan the exchanges. Collective over the tensor- and the data-parallel group.

        Args:
            table: of the model.
            tensor_group: the tensor-parallel group of this optimizer's parameters.
            device: where exchanges and Newton-Schulz run; by default where the gradients are.
        """
        self.table = table
        grid = Grid.of(self.data_parallel_group, tensor_group)
        layouts = [buffer_layout(buffer, table) for buffer in self.buffers]
        mains = {
            table[parameter].name: (main, self._get_model_param_range_map(parameter)["param"].start)
            for parameter, main in self.main_shards().items()
            if table[parameter].optimizer == MUON
        }
        here = next((buffer.grad_data.device for buffer in self.buffers), torch.device("cpu"))
        bind(self.optimizer, layouts, mains, grid, device or here)

    def main_shards(self) -> dict[Any, torch.Tensor]:
        """Model parameter -> this rank's fp32 shard of it."""
        pairs = (
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        )
        return {
            parameter: main
            for models, shards in pairs
            for model_group, shard_group in zip(models, shards, strict=True)
            for parameter, main in zip(model_group, shard_group, strict=True)
        }

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As Megatron's, without its cases for the Adams of Transformer Engine, apex and torch."""
        groups = [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups]
        state: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if self.grad_scaler:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As Megatron's; checkpoints of AdamW are refused or converted (``--muon-adamw-checkpoint``).

        Raises:
            FeatureError: if the checkpoint's optimizer state does not mean the same.
        """
        self.optimizer.init_states()
        saved = state_dict["optimizer"]["param_groups"]
        groups = matching_groups(saved, self.optimizer.param_groups, self.optimizer.settings)
        inner = {**state_dict["optimizer"], "param_groups": groups}
        super().load_state_dict({**state_dict, "optimizer": inner})
        self.optimizer.set_step(int(groups[0]["step"]))

    def _get_main_param_and_optimizer_states(self, model_param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        main = self.main_shards_of(model_param)
        state = self.optimizer.state[main]
        second = state.get("exp_avg_sq")
        if second is None:
            # In host memory: only the checkpoint's reader and writer see it.
            second = torch.zeros(main.shape, dtype=torch.float32, device="cpu")
        return {"param": main, "exp_avg": state["exp_avg"], "exp_avg_sq": second}

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(
        self, model_param: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        main = self.main_shards_of(model_param)
        state = self.optimizer.state[main]
        entry = self.table[model_param]
        convert = self.optimizer.settings.adamw_checkpoint == "convert"
        saved_with_muon = not tensors["exp_avg_sq"].any() and bool(tensors["exp_avg"].any())
        if entry.optimizer == MUON and tensors["exp_avg_sq"].any() and not convert:
            raise FeatureError(f"per-head-muon: the checkpoint holds AdamW's state for {entry.name}; {_WAYS_OUT}")
        if entry.optimizer == ADAMW and saved_with_muon:
            raise FeatureError(
                f"per-head-muon: the checkpoint holds Muon's state for {entry.name}, which AdamW updates now "
                f"({entry.why}): without second moments its first steps would be far too large. Use the splitting "
                "rules of the run that saved it, or start a new optimizer state with --no-load-optim"
            )
        main.copy_(tensors["param"])
        for key in ("exp_avg", "exp_avg_sq"):
            if key in state:
                state[key].copy_(tensors[key])

    def main_shards_of(self, model_param: torch.nn.Parameter) -> torch.Tensor:
        """This rank's fp32 shard of a model parameter."""
        group, place = self.model_param_group_index_map[model_param]
        return self.optimizer.param_groups[group]["params"][place]


_WAYS_OUT = (
    "take its first moments as Muon's momentum with --muon-adamw-checkpoint convert, or start a new optimizer state "
    "with --no-load-optim"
)


def _identity(group: Mapping[str, Any]) -> tuple:
    """What Megatron tells parameter groups apart by."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys)


def matching_groups(saved: Groups, current: Groups, settings: MuonSettings) -> Groups:
    """The saved parameter groups for the current ones.

    Raises:
        FeatureError: for groups that AdamW saved, unless they are to be converted, and for groups that do not match.
    """
    if not all(group.get("optimizer") in (MUON, ADAMW) for group in saved):
        if settings.adamw_checkpoint != "convert":
            raise FeatureError(f"per-head-muon: another optimizer's state is in the checkpoint; {_WAYS_OUT}")
        saved = [{"step": 0, **group, "optimizer": name} for group in saved for name in (MUON, ADAMW)]
    known = {_identity(group) for group in saved}
    missing = [group for group in current if _identity(group) not in known]
    if missing:
        listing = "; ".join(str(dict(zip(param_group_identifier_keys, _identity(g), strict=True))) for g in missing)
        raise FeatureError(
            f"per-head-muon: the checkpoint has no parameter group for {listing}. Use the learning-rate flags of the "
            "run that saved it (--lr, --min-lr, --muon-adamw-lr, --decoupled-lr), or start a new optimizer state with "
            "--no-load-optim"
        )
    return saved


class _ReplicatedStates(MegatronOptimizer):
    """Loading for Megatron's optimizers that keep whole parameters on every rank."""

    def sharded_state_dict(
        self, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, **keywords: Any
    ) -> dict[str, Any]:
        """As Megatron's. While loading, groups come without the numbers of their parameters: merging those into the
        groups of another optimizer fails with a message about lists, before anybody can say what is wrong."""
        state = super().sharded_state_dict(model_sharded_state_dict, is_loading, **keywords)
        if is_loading:
            for group in state.get("optimizer", state)["param_groups"]:
                del group["params"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As Megatron's; checkpoints of another optimizer are refused.

        Raises:
            FeatureError: if the checkpoint's optimizer state does not mean the same.
        """
        groups = state_dict.get("optimizer", state_dict)["param_groups"]
        if not all(group.get("optimizer") in (MUON, ADAMW) for group in groups):
            raise FeatureError(
                "per-head-muon: another optimizer's state is in the checkpoint; start a new one with --no-load-optim, "
                "or convert it with --use-distributed-optimizer --muon-adamw-checkpoint convert"
            )
        matching_groups(groups, self.optimizer.param_groups, self.optimizer.settings)
        for group, own in zip(groups, self.optimizer.state_dict()["param_groups"], strict=True):
            group.setdefault("params", own["params"])
        super().load_state_dict(state_dict)
        self.optimizer.set_step(int(self.optimizer.param_groups[0]["step"]))


class PerHeadMuonFP32Optimizer(_ReplicatedStates, FP32Optimizer):
    """`FP32Optimizer` over a `PerHeadMuon`: plain data parallelism, the work divided by owner."""


class PerHeadMuonFloat16Optimizer(_ReplicatedStates, Float16OptimizerWithFloat16Params):
    """`Float16OptimizerWithFloat16Params` over a `PerHeadMuon`: plain data parallelism, the work divided by owner."""


def divided_groups(param_groups: Groups, table: Mapping[Any, Entry], config: Any, settings: MuonSettings) -> Groups:
    """Every group of Megatron's as two, matrices and the rest, in the same order on every rank (empty ones too)."""
    result = []
    for group in param_groups:
        for name in (MUON, ADAMW):
            params = [p for p in group["params"] if table[p].optimizer == name]
            divided = {**group, "params": params, "optimizer": name}
            # A group whose learning rate was set apart already (--decoupled-lr) keeps it.
            if name == ADAMW and settings.adamw_lr is not None and group["max_lr"] == config.lr:
                low = settings.adamw_min_lr
                if low is None:
                    low = config.min_lr * settings.adamw_lr / config.lr if config.lr else config.min_lr
                divided |= {"max_lr": settings.adamw_lr, "min_lr": low, "default_config": False}
            result.append(divided)
    return result


def build(
    original: Callable[..., Any],
    settings: MuonSettings,
    config: Any,
    model_chunks: Sequence[Any],
    param_groups: Groups,
    per_model_buffers: Mapping[int, Any] | None = None,
    model_parallel_group: Any = None,
    data_parallel_group: Any = None,
    data_parallel_group_gloo: Any = None,
    data_parallel_group_idx: int | None = None,
    intra_dist_opt_group: Any = None,
    distributed_optimizer_instance_id: int = 0,
    pg_collection: Any = None,
    skip_megatron_wrapping: bool = False,
) -> Any:
    """The optimizer of some parameter groups (all of them dense, or all of them routed experts).

    Arguments after ``settings`` are those of Megatron's ``_get_megatron_optimizer_based_on_param_groups``, which is
    called where there is nothing for Muon to do: on a rank without trainable parameters, and for other optimizers.
    """
    if not param_groups or skip_megatron_wrapping or config.optimizer != "adam":
        return original(
            config,
            model_chunks,
            param_groups,
            per_model_buffers,
            model_parallel_group,
            data_parallel_group,
            data_parallel_group_gloo,
            data_parallel_group_idx,
            intra_dist_opt_group,
            distributed_optimizer_instance_id,
            pg_collection,
            skip_megatron_wrapping,
        )
    if not config.decoupled_weight_decay:
        raise FeatureError("per-head-muon decays weights as AdamW does; drop the option that couples weight decay")
    table = build_table(model_chunks, settings)
    inner = PerHeadMuon(
        divided_groups(param_groups, table, config, settings),
        settings,
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
    )
    scaler = ConstantGradScaler(config.loss_scale) if config.loss_scale else None
    arguments = (inner, config, scaler, _init_states)
    if config.use_distributed_optimizer:
        optimizer = PerHeadMuonDistributedOptimizer(
            *arguments,
            model_chunks=model_chunks,
            per_model_buffers=per_model_buffers,
            data_parallel_group=data_parallel_group,
            data_parallel_group_gloo=data_parallel_group_gloo,
            data_parallel_group_idx=data_parallel_group_idx,
            distributed_optimizer_instance_id=distributed_optimizer_instance_id,
        )
        optimizer.grad_stats_parallel_group = intra_dist_opt_group
    else:
        if config.bf16:
            optimizer = PerHeadMuonFloat16Optimizer(*arguments)
        else:
            optimizer = PerHeadMuonFP32Optimizer(inner, config, _init_states)
        optimizer.grad_stats_parallel_group = model_parallel_group
    if pg_collection is None or not hasattr(pg_collection, "tp"):
        pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    optimizer.tp_group = pg_collection.tp
    optimizer.expert_tp_group = getattr(pg_collection, "expt_tp", pg_collection.tp)

    tensor_group = optimizer.expert_tp_group if param_groups[0]["is_expert_parallel"] else optimizer.tp_group
    if config.use_distributed_optimizer:
        optimizer.bind_muon(table, tensor_group)
    else:
        trained = {p for group in param_groups for p in group["params"]}
        _bind_replicated(inner, table, trained, Grid.of(data_parallel_group, tensor_group))
    return optimizer


def _init_states(optimizer: PerHeadMuon, config: Any = None) -> None:
    """Megatron's ``init_state_fn``."""
    optimizer.init_states()


def _bind_replicated(optimizer: PerHeadMuon, table: Mapping[Any, Entry], trained: set, grid: Grid) -> None:
    chunks: dict[str, list[Entry]] = {}
    mains = {}
    for parameter, entry in table.items():
        if entry.optimizer == MUON and parameter in trained:
            chunks.setdefault(entry.name.partition(".")[0], []).append(entry)
            mains[entry.name] = (getattr(parameter, "main_param", parameter), 0)
    device = next((main.device for main, _ in mains.values()), torch.device("cpu"))
    bind(optimizer, [ChunkLayout(entries, None) for entries in chunks.values()], mains, grid, device)


def wrap_factory(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups."""

    @functools.wraps(original)
    def _get_megatron_optimizer_based_on_param_groups(config: Any, *arguments: Any, **keywords: Any) -> Any:
        from k3_plugins.activation import active
        from k3_plugins.optimizer.per_head_muon.runtime import OPTIMIZERS

        settings = MuonSettings.resolve(config, active().configs["per-head-muon"])
        optimizer = build(original, settings, config, *arguments, **keywords)
        if isinstance(getattr(optimizer, "optimizer", None), PerHeadMuon):
            OPTIMIZERS.append(optimizer.optimizer)
        return optimizer

    return _get_megatron_optimizer_based_on_param_groups
