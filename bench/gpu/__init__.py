"""Checks and benchmarks of the GPU path: `python -m moeserve.bench.gpu.run`."""
