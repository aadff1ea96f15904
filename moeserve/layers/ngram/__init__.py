"""Embeddings of the last few tokens, added to all residual streams."""
