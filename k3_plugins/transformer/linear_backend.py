"""Which library the feed-forward networks' linear layers come from."""

from __future__ import annotations

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer import TransformerConfig


def linear_backend(config: TransformerConfig) -> BackendSpecProvider:
    """Transformer Engine when asked for, else Megatron.

    Raises:
        ValueError: if it is asked for and not installed.
    """
    if config.transformer_impl != "transformer_engine":
        return LocalSpecProvider()
    if not HAVE_TE:
        raise ValueError(
            "--transformer-impl transformer_engine needs Transformer Engine: pip install "
            "'transformer-engine[core-cu13,pytorch]', or pass --transformer-impl local."
        )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()
