"""Engines, which schedule requests into steps and return the tokens, on one rank or many."""
