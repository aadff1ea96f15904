"""Hyper-connections: the operations before and after a network on several residual streams."""
