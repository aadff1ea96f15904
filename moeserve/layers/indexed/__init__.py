"""Grouped-query attention to positions that an indexer chooses."""
