"""Model families: reading their configurations, building the decoder, and loading its weights."""
