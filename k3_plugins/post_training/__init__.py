"""Post-training: the chat template."""
