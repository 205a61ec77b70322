"""Vision: the encoder, and what feeds it."""
