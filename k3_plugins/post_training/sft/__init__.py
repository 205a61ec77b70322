"""Supervised fine-tuning on conversations: JSONL through the XTML template, loss on what the model is to write."""
