"""Attention whose query and output projections belong to experts."""
