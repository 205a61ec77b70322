"""XTML, the chat template: messages to token segments with a loss mask, and back by a strict streaming parser."""
