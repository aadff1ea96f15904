"""Benchmarks of moeserve beside other engines and the limits of the machine."""
