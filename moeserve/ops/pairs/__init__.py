"""Pairs of a token and one of its experts: sorting, moving rows, and summing outputs."""
