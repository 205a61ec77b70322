"""Data parallelism: how gradients are held, reduced and handed to the optimizer."""
