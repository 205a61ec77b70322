"""Optimizers and repairs of Megatron's; folders mirror ``megatron/core/optimizer``."""
