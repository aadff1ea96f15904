"""Model families: their configurations, their layers put together, and the weights that fill them."""
