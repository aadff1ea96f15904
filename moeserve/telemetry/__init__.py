"""Records of a run: expert load, its files, table and picture, and Prometheus metrics."""
