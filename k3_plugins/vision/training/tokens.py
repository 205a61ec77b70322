"""The ids of the byte-level vocabulary with images."""

END = 256
"""Ends a pair."""
IMAGE = 257
"""Stands where a token of an image comes in."""
MARK = b"<|media_pad|>"
"""Stands in a text where the image belongs; a text without it follows its image."""
SIZE = 258
"""Smallest vocabulary that holds them all."""
