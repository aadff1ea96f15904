"""Scheduling of one replica, and its agreement with the other replicas. Pure Python, without tensors or I/O."""
