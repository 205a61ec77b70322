"""What can go wrong with memory of other ranks. Imports neither torch nor megatron."""

from k3_plugins.memory.activation_manager.errors import ActivationError


class RemoteError(ActivationError):
    """Bytes could not be put into, or had back from, another rank's memory. The text names the tensor and the peer."""
