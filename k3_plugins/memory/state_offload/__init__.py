"""Training state on a local disk between phases: weights and optimizer states go out and come back bit-equal."""
