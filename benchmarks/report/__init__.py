"""All benchmarks on one page: every claim, what was compared, ours, the peer's, and the ratio."""
