"""The draft model of speculative decoding, trained from the pre-trained multi-token-prediction layer."""
