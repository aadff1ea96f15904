"""Grouped-query attention over a paged cache of keys and values."""
