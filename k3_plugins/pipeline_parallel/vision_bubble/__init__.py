"""Encoder work in the bubbles of the text pipeline. Planning and simulation are pure, without processes:

problem.py     what is to be planned: pipeline layout and times
text_order.py  the order in which Megatron runs text work on each rank
paths.py       longest paths through the tasks, kept up to date while tasks are inserted
planner.py     places every encoder task, and says how good a plan can be
events.py      the plan as Megatron's sends, receives and waits: deadlocks are found before training
plot.py        the picture and the Chrome trace

The runtime, feature ``vision-bubble``, executes plans inside Megatron's own schedules:

runtime.py     one step: data, plan, schedule, times
session.py     encoder tasks at their places in a running schedule
"""
