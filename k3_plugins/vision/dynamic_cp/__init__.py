"""Context parallelism of the vision encoder: large images and long videos are split over ranks, small ones are not."""
