"""The operations as C++ kernels on a CPU."""
