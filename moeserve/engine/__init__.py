"""The engine core: the loop that turns requests into steps and steps into tokens."""
