"""Where the activation manager enters Megatron's training. Imports neither torch nor megatron."""

from __future__ import annotations

import difflib
import functools
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from k3_plugins.feature import FeatureError
from k3_plugins.memory.activation_manager.errors import ActivationError
from k3_plugins.memory.activation_manager.names import LABELS
from k3_plugins.memory.policy import Policy
from k3_plugins.training.metrics import due, write

if TYPE_CHECKING:
    from k3_plugins.memory.activation_manager.config import ActivationManagerConfig
    from k3_plugins.memory.activation_manager.manager import ActivationManager
    from k3_plugins.memory.activation_manager.rules import Rule
    from k3_plugins.memory.activation_manager.sites import Attachment
    from k3_plugins.memory.remote.lending import Lending
    from k3_plugins.memory.remote.watch import Watch


class _Runtime:
    """The manager of the model in training, for the witness and the metrics."""

    manager: ActivationManager | None = None
    attachments: tuple[Attachment, ...] = ()
    lending: Lending | None = None
    watch: Watch | None = None


RUNTIME = _Runtime()

HOST_VARIABLE = "K3_ACTIVATION_HOST"
"""Address at which other ranks reach this machine: a variable, since flags must be the same on every rank."""


def attach_before_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for `get_megatron_optimizer`."""

    @functools.wraps(original)
    def get_megatron_optimizer(config: Any, model_chunks: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        from k3_plugins import activation

        settings = activation.active().config("activation-manager")
        RUNTIME.manager, RUNTIME.attachments = attach(model_chunks, settings)
        return original(config, model_chunks, *args, **kwargs)

    return get_megatron_optimizer


def attach(
    model_chunks: Sequence[Any], settings: ActivationManagerConfig
) -> tuple[ActivationManager, tuple[Attachment, ...]]:
    """Put a manager on every chunk of a Megatron model, wrapped or not. Collective over all ranks.

    Raises:
        FeatureError: for a rule that cannot match anything in the model.
    """
    from megatron.core.utils import unwrap_model

    from k3_plugins.memory.activation_manager.manager import ActivationManager
    from k3_plugins.memory.activation_manager.random_states import MegatronRandomStates
    from k3_plugins.memory.activation_manager.rules import parse_rules
    from k3_plugins.memory.activation_manager.sites import Attachment, megatron_layers

    assert settings.activation_policy is not None, "checked with the arguments"
    limit = settings.activation_host_pool_mib
    manager = ActivationManager(
        parse_rules(settings.activation_policy),
        smallest=settings.activation_min_bytes,
        pool_limit=None if limit is None else int(limit * (1 << 20)),
        only_e4m3=settings.activation_fp8_codes == "e4m3",
        random=MegatronRandomStates(),
    )
    chunks = unwrap_model(list(model_chunks))
    attachments = tuple(
        Attachment(manager, number, chunk, megatron_layers(chunk)) for number, chunk in enumerate(chunks)
    )
    names = {item for attachment in attachments for item in attachment.names}
    possible = _on_any_rank([any(_could_match(rule, *item) for item in names) for rule in manager.rules.rules])
    for rule, matches in zip(manager.rules.rules, possible, strict=True):
        if not matches:
            known = sorted({name for name, _ in names})
            near = difflib.get_close_matches(rule.pattern.lower(), known, n=3, cutoff=0.4) or known[:8]
            hint = f"Names here are for example {', '.join(near)}"
            if rule.layers is not None and any(_could_match(replace(rule, layers=None), *item) for item in names):
                hint = f"No layer {'-'.join(map(str, sorted(set(rule.layers))))} has it; layers are counted from 1"
            raise FeatureError(
                f"--activation-policy: rule {str(rule)!r} matches nothing in this model. {hint}; see"
                " k3_plugins/memory/activation_manager/README.md"
            )
    return manager, attachments


def _could_match(rule: Rule, module: str, layer: int | None) -> bool:
    """Whether a rule may match a tensor of a module; names that users' annotations give are taken for possible."""
    if rule.matches(module, layer) or any(rule.matches(f"{module}.{label}", layer) for label in LABELS):
        return True
    parent = rule.pattern.rpartition(".")[0]
    return bool(parent) and not set(parent) & set("*?[") and parent == module and rule.layers is None


def _on_any_rank(flags: Sequence[bool]) -> list[bool]:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return list(flags)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    counts = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    return [bool(count) for count in counts.tolist()]


def explain_failures(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for `train_step`: a step that fails while another rank is dying ends with the reason."""

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception:
            if RUNTIME.watch is not None:
                traceback.print_exc()
                RUNTIME.watch.end_with_reason()
            raise

    return train_step


def idle_rules(manager: ActivationManager) -> list[Rule]:
    """Rules that matched nothing on any rank. Collective over all ranks."""
    used = _on_any_rank([hits > 0 for hits in manager.rules.hits])
    return [rule for rule, hit in zip(manager.rules.rules, used, strict=True) if not hit]


def explain_idle(rule: Rule) -> str:
    """A sentence for a rule that matched nothing."""
    text = f"--activation-policy: rule {str(rule)!r} matched no saved tensor on any rank; drop or correct it"
    if rule.policy is Policy.RECOMPUTE:
        text += (
            " (recompute takes a module that is called and that no later rule claims, or a tensor that annotate()"
            " says how to compute; with moonep, --moe-moonep-memory-efficient takes the place of"
            " experts.act=recompute; under --recompute-granularity full everything is computed again already)"
        )
    return text


def start_lending(manager: ActivationManager, args: Any) -> Lending | None:
    """After the first step, where a rule says remote: the plan and the leases. Collective over all ranks."""
    if all(rule.policy.place != "remote" for rule in manager.rules.rules):
        return None
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    from k3_plugins import activation
    from k3_plugins.memory.remote.lending import LendingSettings, arrange
    from k3_plugins.memory.remote.schedule import Schedule
    from k3_plugins.memory.remote.watch import Watch

    settings: ActivationManagerConfig = activation.active().config("activation-manager")
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    schedule = Schedule(
        dist.get_world_size(pipeline),
        get_num_microbatches(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        args.microbatch_group_size_per_vp_stage,
    )
    lending = arrange(
        schedule,
        [manager.rows[chunk] for chunk in sorted(manager.rows)],
        LendingSettings(
            protocol=settings.activation_remote_protocol,
            host=os.environ.get(HOST_VARIABLE),
            timeout=settings.activation_remote_timeout,
            checksums=settings.activation_remote_checksum,
            headroom=settings.activation_remote_headroom,
        ),
        pipeline,
        report=_publish,
        pinned=dist.get_backend() == "nccl" and torch.cuda.is_available(),
    )
    lending.made_after = manager.passes
    manager.remote, manager.plan = lending.carrier, lending.plan
    manager.level = lending.plan.levels[lending.place]
    manager.ledger.reset_peak()
    default_store: Any = dist.distributed_c10d._get_default_store()  # torch's stubs leave out clone()
    store = default_store.clone()
    RUNTIME.lending = lending
    RUNTIME.watch = Watch(store, dist.get_rank(), dist.get_world_size(), lending.partners)
    RUNTIME.watch.start()
    return lending


def _publish(text: str) -> None:
    """Tell the other ranks why this one fails; nothing is lent before the watch is on."""
    if RUNTIME.watch is not None:
        RUNTIME.watch.publish(text)


METRICS = (
    "k3/activation-device-peak-bytes",
    "k3/activation-host-peak-bytes",
    "k3/activation-remote-sent-bytes",
    "k3/activation-blocked-ms",
)


def write_metrics(original: Callable[..., Any]) -> Callable[..., Any]:
    """Patch body for `training_log`: the numbers of the rank that writes, and every rank's report."""

    @functools.wraps(original)
    def training_log(
        loss_dict: dict, total_loss_dict: dict, learning_rate: float | None, iteration: int, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
        if RUNTIME.manager is not None:
            _check_lending(RUNTIME.manager)
            _write(RUNTIME.manager, iteration)
        return result

    return training_log


def _check_lending(manager: ActivationManager) -> None:
    """A rank that borrows must have sent something in the first step under the plan.

    Raises:
        ActivationError: if it has not.
    """
    lending = RUNTIME.lending
    if lending is None or manager.passes == lending.made_after:
        return
    if lending.plan.of_borrower(lending.place) and not lending.carrier.sent_bytes:
        text = (
            f"pipeline stage {lending.place} borrows memory by the plan and sent nothing in a whole step: its"
            " activations are smaller than in the first step. Drop remote from --activation-policy, or start again"
        )
        _publish(text)
        raise ActivationError(text)


def _write(manager: ActivationManager, iteration: int) -> None:
    from megatron.training import get_args

    from k3_plugins.memory.activation_manager.record import write_record

    args = get_args()
    manager.settle()
    if args.activation_report is not None and (iteration == 1 or iteration % args.log_interval == 0):
        write_record(args.activation_report, manager, args, iteration)
    if not due(iteration):
        return
    remote = manager.remote
    sent = 0 if remote is None else remote.sent_bytes
    blocked = manager.blocked.seconds + (0 if remote is None else remote.blocked.seconds)
    values = dict(zip(METRICS, (manager.ledger.peak, manager.pool.peak, sent, blocked * 1000), strict=True))
    write(values, iteration)
