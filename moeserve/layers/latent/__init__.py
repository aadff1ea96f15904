"""Multi-head latent attention and its indexer."""
