"""Operators of mixture-of-experts layers: activations, segment GEMMs, the gated expert network and its oracle."""
