"""The worker of one rank: its model, its KV cache, and the execution of steps."""
