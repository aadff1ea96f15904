"""GPU kernels: plain tensors in and out. Each module imports triton; this package does not."""
