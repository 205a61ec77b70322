"""Shared machinery of the multi-process tests: start N gloo ranks, time-limit them, and read bit-exact
losses.

    launch    run a script or a module under torchrun
    spawn     run one Python function on N ranks and collect what it returns
    recorded  run a module or script and write every step's loss as hexadecimal floats
    losses    read and compare those records
    processes whether processes that a test did not start itself have ended
    stock_gpt the smallest stock Megatron GPT pre-training script, without plug-ins
"""
