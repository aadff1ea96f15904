"""KV caches: the bookkeeping of the blocks and states that requests hold. Only `rank` has tensors."""
