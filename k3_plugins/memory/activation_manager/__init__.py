"""Activation manager: every tensor saved for the backward pass has a storage policy (feature `activation-manager`)."""
