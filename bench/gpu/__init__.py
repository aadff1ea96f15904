"""Everything that needs a GPU to be checked or measured, in one run: `python -m moeserve.bench.gpu.run`."""
