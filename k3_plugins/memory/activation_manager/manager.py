"""Takes every tensor that autograd saves in a model chunk's forward pass and gives it back in the backward pass.

forward pass of a chunk        `Recording`: hooks are on; modules say where they are (`sites.py`)
  layer                        `Group`: what was saved since the layer began
    save                       `Saved`: the tensor itself for now
  next layer                   `Recording.close_group`: every saved tensor gets the form of its policy
backward pass
  first read in a group        the bytes of the group and of the one before it (the next to run) are fetched
  read                         values, decoded or computed again
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from k3_plugins.memory import annotation
from k3_plugins.memory.activation_manager.host_pool import HostPool
from k3_plugins.memory.activation_manager.ledger import Ledger
from k3_plugins.memory.activation_manager.random_states import RandomStates, TorchRandomStates
from k3_plugins.memory.activation_manager.recording import Recording, Row
from k3_plugins.memory.activation_manager.rules import RuleBook
from k3_plugins.memory.activation_manager.saved import Group, Parameter, Saved, restore, saved_or_parameter
from k3_plugins.memory.activation_manager.stored import Stored
from k3_plugins.memory.activation_manager.transfer import Blocked, Carrier, HostCarrier, StreamCarrier
from k3_plugins.memory.policy import Policy

if TYPE_CHECKING:
    from k3_plugins.memory.activation_manager.rules import Rule
    from k3_plugins.memory.remote.carrier import RemoteCarrier
    from k3_plugins.memory.remote.plan import Plan


class ActivationManager:
    """Of one process.

    Args:
        rules: in the order in which the user wrote them.
        smallest: tensors of fewer bytes stay where they are.
        pool_limit: most bytes of host buffers in use; None for no limit.
        only_e4m3: whether policy fp8 takes no other code, see `fp8`.
        random: the generators that the model draws from; torch's by default.
    """

    def __init__(
        self,
        rules: Iterable[Rule],
        *,
        smallest: int = 0,
        pool_limit: int | None = None,
        only_e4m3: bool = False,
        random: RandomStates | None = None,
    ) -> None:
        self.rules = RuleBook(tuple(rules))
        self.smallest = smallest
        self.only_e4m3 = only_e4m3
        self.pool = HostPool(pool_limit)
        self.ledger = Ledger()
        self.blocked = Blocked()
        self.random = random or TorchRandomStates()
        self.remote: RemoteCarrier | None = None
        """Set when the plan of loans is made."""
        self.plan: Plan | None = None
        self.level = 0
        """Device bytes above which remote tensors leave this rank."""
        self.recording: Recording | None = None
        self.rows: dict[int, list[Row]] = {}
        """By model chunk: what its last forward pass stored."""
        self.passes = 0
        """Forward passes recorded so far."""
        self._parameters: frozenset[int] = frozenset()
        self._hosts: dict[str, Carrier[Any]] = {}
        self._hooks: Any = None
        self._listener: Any = None

    def begin(self, chunk: int, parameters: frozenset[int]) -> None:
        """A forward pass of a model chunk starts."""
        self._parameters = parameters
        self.recording = Recording(self, chunk, parameters)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.recording.pack, restore)
        self._hooks.__enter__()
        self._listener = annotation.set_listener(self.recording)

    def end(self) -> None:
        """It is over, or has failed."""
        recording, self.recording = self.recording, None
        assert recording is not None, "begin comes first"
        annotation.set_listener(self._listener)
        self._hooks.__exit__(None, None, None)
        recording.finish()
        self.rows[recording.chunk] = recording.rows
        self.passes += 1

    def counting(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which saved tensors are counted and kept: for what the backward pass computes again."""
        group = Group("computed again", None, None)

        def pack(tensor: Tensor) -> Saved | Parameter | Tensor:
            return saved_or_parameter(tensor, "recomputation", group, self.ledger, self._parameters)

        return torch.autograd.graph.saved_tensors_hooks(pack, restore)

    @contextmanager
    def remote_layer(self, stored: int, original: int, label: str) -> Iterator[bool]:
        """Around the storing of a layer's remote tensors: whether they leave this rank.

        Before the plan is made (in the first step) they wait in host buffers. Then they leave if this rank would be
        above its level with them.

        Args:
            stored: bytes that they take in the form of their policies.
            original: bytes that they take now.
        """
        if self.remote is None:
            yield True
        elif not stored or self.ledger.held - original + stored <= self.level:
            yield False
        else:
            self.remote.open_stretch(stored, label)
            try:
                yield True
            finally:
                self.remote.close_stretch()

    def store(self, source: Tensor, policy: Policy, origin: torch.UntypedStorage, name: str) -> Stored:
        """Put values where the policy says."""
        carrier: Carrier[Any] | None = None
        if policy.place == "remote" and self.remote is not None:
            carrier = self.remote
        elif policy.place != "device":
            carrier = self._host_carrier(source.device)
        return Stored(
            source,
            coded=policy.coded,
            only_e4m3=self.only_e4m3,
            carrier=carrier,
            ledger=self.ledger,
            origin=origin,
            name=name,
        )

    def _host_carrier(self, device: torch.device) -> Carrier[Any]:
        if device.type not in self._hosts:
            on_gpu = device.type == "cuda"
            self._hosts[device.type] = (
                StreamCarrier(self.pool, self.blocked, device) if on_gpu else HostCarrier(self.pool, self.blocked)
            )
        return self._hosts[device.type]

    def settle(self) -> None:
        """At the end of a step: complete the time measurements of a GPU."""
        for carrier in self._hosts.values():
            if isinstance(carrier, StreamCarrier):
                carrier.settle()

    def bytes_by_policy(self) -> dict[str, int]:
        """Original bytes of the last forward passes of this rank's chunks, by policy."""
        totals: dict[str, int] = defaultdict(int)
        for rows in self.rows.values():
            for row in rows:
                totals[row.policy] += row.nbytes
        return dict(totals)
