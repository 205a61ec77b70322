"""The ids of the byte-level vocabulary with images."""

END = 256
"""Ends a pair."""
IMAGE = 257
"""Stands where a token of an image comes in."""
SIZE = 258
"""Smallest vocabulary that holds them all."""
