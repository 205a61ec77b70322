"""MoonViT-V2: a vision encoder for images and videos of native resolution, packed into one sequence of patches."""
