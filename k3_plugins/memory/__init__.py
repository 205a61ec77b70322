"""Where tensors live: moving them between device memory, host memory and disks."""
