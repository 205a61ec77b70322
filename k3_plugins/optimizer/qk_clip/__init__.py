"""QK-clip: keeps attention logits bounded by shrinking the weights of the heads that exceed a threshold."""
