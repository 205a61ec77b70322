"""Model descriptions; the only place that composes features into a model."""
