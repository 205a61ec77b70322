"""Which residual blocks a pipeline hop carries, how they are packed, and where the rest is kept.

`plan` is pure arithmetic (no torch); `wire` is the only place that packs and unpacks; `cache` keeps blocks for later
virtual stages and collects their gradients; `session` binds the three for one step; `communicator` tells Megatron's
P2PCommunicator the sizes; `schedule` wraps Megatron's choice of schedule. Nothing is imported here.
"""
