"""MXFP4 quantization-aware training: routed experts see the values that the exported weights will have."""
