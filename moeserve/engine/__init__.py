"""Engines: they turn requests into steps, and steps into tokens, on one rank or many."""
