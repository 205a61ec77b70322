"""Stable LatentMoE: routed experts in a narrow latent space, shared experts at full width (K3 report, equation 11)."""
