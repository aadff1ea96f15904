"""The scripts that run inside a peer's own environment: one per peer. They know that peer and the standard library."""
