"""Attention whose projections of queries and outputs are those of experts."""
