"""The only place that knows versions: of Megatron, of Python, of optional packages."""
