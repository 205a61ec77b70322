"""MoonEP: expert parallelism in which every rank computes the same number of tokens, whatever the router chose."""
