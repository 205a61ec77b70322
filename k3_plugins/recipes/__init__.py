"""What is built out of whole training runs: fair comparisons of two ways to train."""
