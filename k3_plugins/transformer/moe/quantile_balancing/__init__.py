"""Quantile Balancing: router biases from the quantiles of score margins over the whole global batch (K3 report)."""
