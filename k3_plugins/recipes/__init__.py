"""What is built out of whole training runs: fair comparisons, and a curriculum of growing contexts."""
