"""Post-training: quantization-aware training, the chat template, fine-tuning on conversations."""
