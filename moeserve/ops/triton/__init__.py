"""The operations as Triton kernels on a GPU."""
