"""Attention, mixture-of-experts and residual modules; folders mirror ``megatron/core/transformer``."""
