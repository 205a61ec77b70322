"""Kimi-K3 and Kimi-Linear: one description, its presets, and the layer specs derived from it."""
