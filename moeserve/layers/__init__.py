"""Building blocks that models are put together from."""
