"""Pipeline ZeRO-2: two gradient buffers on the device for all model chunks, gradient shards in host memory."""
