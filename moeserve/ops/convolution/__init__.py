"""Causal depthwise convolutions over the last few tokens."""
