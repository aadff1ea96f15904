"""Executors: how the ranks of one replica are run."""
