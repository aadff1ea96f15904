"""Linear attention with a state for each request."""
