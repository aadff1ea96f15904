"""Scripts that run inside a peer's own environment, one per peer. They import only that peer."""
