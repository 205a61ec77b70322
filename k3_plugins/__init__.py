"""k3_plugins: turns an unmodified Megatron-Core into a trainer for Kimi-K3-style models.

Importing this package has no side effect: it imports neither torch nor megatron and patches nothing. A door
(``k3_plugins.pretrain_gpt``, ``k3_plugins.launch`` or a patched ``pretrain_gpt.py``) calls
``k3_plugins.bootstrap.activate`` with the command line, and only the features named there are loaded.
"""

__version__ = "0.1.0"
