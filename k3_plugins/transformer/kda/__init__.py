"""Kimi Delta Attention: the layer, its operators and its context parallelism (Kimi Linear, arXiv 2510.26692)."""
