"""Dispatchers, which send tokens to their experts and combine the outputs."""
