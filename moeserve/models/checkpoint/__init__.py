"""Checkpoints: their files, formats, tensors, and the loading of weights."""
