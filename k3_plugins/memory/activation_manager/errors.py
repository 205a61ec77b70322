"""What can go wrong with saved activations. Imports neither torch nor megatron."""


class ActivationError(RuntimeError):
    """A saved activation cannot be stored or restored. The text names the tensor and says what to do."""
