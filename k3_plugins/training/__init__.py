"""What Megatron leaves to ``pretrain_gpt.py``: data sets, batches, the forward step and the loss.

The wheel ships the training loop (``megatron.training``) but not that script; these modules are the plug-in's own, so
that a user of the wheel alone can train.
"""
