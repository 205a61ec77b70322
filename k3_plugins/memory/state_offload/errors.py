"""What can go wrong with state on disk. Imports neither torch nor megatron."""


class StateOffloadError(Exception):
    """The state could not be moved. The text says what failed, where the state is now, and what to do."""
