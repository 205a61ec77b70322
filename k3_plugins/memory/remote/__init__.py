"""Activations of early pipeline ranks in the memory of late ones: the plan, and the transport (policy `remote`)."""
