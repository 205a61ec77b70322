"""Is one way to train better than another? ``python -m k3_plugins.recipes.compare --help``.

``arm`` reads what is compared, ``trial`` trains one point, ``search`` finds each arm's own optimum, ``verdict`` says
what may be concluded, ``report`` writes it down.
"""
