"""Training on images and text: pairs from webdataset shards, rows of interleaved tokens, the model with its encoder."""
