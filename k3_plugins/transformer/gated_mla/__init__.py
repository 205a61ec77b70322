"""Gated multi-head latent attention without position encoding (K3 technical report, arXiv 2607.24653)."""
