"""How a model would train on a number of GPUs, computed without any: ``python -m k3_plugins.plan --help``.

``parameters`` and ``flops`` count what the model description implies, ``layout`` lists the ways to split it, ``memory``
and ``cost`` estimate one of them, ``search`` compares all, ``report`` shows the result. Pure arithmetic: no torch, no
Megatron.
"""
