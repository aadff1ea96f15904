"""One rank: its model, its KV cache, and the steps it runs."""
