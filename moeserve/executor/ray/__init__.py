"""Ranks as actors of a Ray cluster. Only this package imports ray. All data is sent as bytes encoded by msgspec."""
