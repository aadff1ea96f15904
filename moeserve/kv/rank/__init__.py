"""One rank's caches: tensors, stores behind them, and transfers to other engines."""
