"""Text to Megatron data set: ``prepare`` makes one, ``flags`` prints its Megatron flags, ``bigram`` is its baseline.

Like every part of the package, importing this imports neither torch nor megatron.
"""
