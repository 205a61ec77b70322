"""Mixture of experts: LatentMoE, Quantile Balancing and MoonEP, three features that work alone and together."""
