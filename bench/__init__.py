"""Benchmarks of moeserve, compared with other engines and with the limits of the machine."""
