"""Executors, which run the ranks of one replica."""
