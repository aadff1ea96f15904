"""Estimates and simulations of a model on a cluster, without weights or accelerators."""
