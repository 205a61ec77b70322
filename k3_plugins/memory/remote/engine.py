"""Mooncake's transfer engine with errors instead of return codes.

The package answers -1 for an unregistered remote address, a length beyond the registered memory, a wrong session and a
dead peer, and takes an unregistered LOCAL buffer without a word; so local buffers are checked here. A peer that hangs
is given up after the time limit (`MC_TRANSFER_TIMEOUT`, read by the package when it starts).
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from typing import Any

from torch import Tensor

from k3_plugins.compat.optional import require
from k3_plugins.feature import FeatureError
from k3_plugins.memory.remote.errors import RemoteError

SYSTEM_LIBRARY = "ibverbs"
INSTALL_LIBRARY = "apt-get install libibverbs1 (Debian, Ubuntu), or your system's package of libibverbs"


def load() -> Any:
    """The package's class.

    Raises:
        FeatureError: if the package or the system library it needs is missing, with what to install.
    """
    if sys.platform == "linux" and ctypes.util.find_library(SYSTEM_LIBRARY) is None:
        raise FeatureError(f"policy remote needs the system library libibverbs, also for tcp: {INSTALL_LIBRARY}")
    return require("mooncake.engine", "policy remote").TransferEngine


class Engine:
    """This process's end of the transport.

    Args:
        host: address at which the other ranks reach this one.
        protocol: ``tcp`` or ``rdma``.
        timeout: seconds after which a transfer to a peer that does not answer fails.

    Raises:
        FeatureError: if the package is missing.
        RemoteError: if it does not start.
    """

    def __init__(self, host: str, protocol: str, timeout: int) -> None:
        os.environ["MC_TRANSFER_TIMEOUT"] = str(timeout)
        self._engine = load()()
        if code := self._engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
            raise RemoteError(f"mooncake does not start with protocol {protocol} on {host} (code {code})")
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self._registered: list[Tensor] = []

    def register(self, memory: Tensor) -> None:
        """Make a contiguous tensor's memory known to the transport; it is kept alive.

        Raises:
            RemoteError: if the transport does not take it.
        """
        code = self._engine.register_memory(memory.data_ptr(), memory.numel() * memory.element_size())
        if code:
            raise RemoteError(
                f"mooncake cannot register {memory.numel() * memory.element_size()} bytes (code {code}; -7: registered"
                " already)"
            )
        self._registered.append(memory)

    def write(self, session: str, source: Tensor, address: int, what: str) -> None:
        """Copy uint8 ``[n]`` to a peer's memory; done when this returns.

        Args:
            what: names tensor and peer, for the message.

        Raises:
            RemoteError: if the bytes may not all be there.
        """
        self._check(source, what)
        code = self._engine.transfer_sync_write(session, source.data_ptr(), address, source.numel())
        if code:
            raise RemoteError(f"{what} could not be written to {session} (code {code}): {_REASONS}")

    def read(self, session: str, into: Tensor, address: int, what: str) -> None:
        """Fill uint8 ``[n]`` from a peer's memory; see `write`."""
        self._check(into, what)
        code = self._engine.transfer_sync_read(session, into.data_ptr(), address, into.numel())
        if code:
            raise RemoteError(f"{what} could not be read from {session} (code {code}): {_REASONS}")

    def _check(self, local: Tensor, what: str) -> None:
        start, end = local.data_ptr(), local.data_ptr() + local.numel()
        if not any(m.data_ptr() <= start and end <= m.data_ptr() + m.numel() for m in self._registered):
            raise RemoteError(f"{what}: the local buffer is not registered with the transport")


_REASONS = (
    "the peer died or hangs, the session is not its own, or the address is outside of what it registered. Start again"
    " from the last checkpoint; --activation-policy with cpu in place of remote needs no peer"
)
