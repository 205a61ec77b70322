"""Aggregation of residual sources: `naive` (the literal equations), `aggregate` (lean autograd), `two_phase` (batched).

Nothing is imported here, so that reading one file never pulls in another.
"""
