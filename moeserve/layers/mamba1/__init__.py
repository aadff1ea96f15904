"""Selective state spaces (Mamba-1)."""
