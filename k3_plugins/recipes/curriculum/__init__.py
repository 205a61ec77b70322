"""One training run through growing contexts: ``python -m k3_plugins.recipes.curriculum --help``.

``schedule`` reads the declared stages and places each on the learning-rate curve of the whole run, ``stages`` trains
them one after the other, each resuming from the checkpoint of the one before, under a layout of its own.
"""
