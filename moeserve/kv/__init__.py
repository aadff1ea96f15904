"""KV caches: what requests hold of them, and the tensors of each rank in `rank`. Without tensors outside `rank`."""
