"""Records of expert load with their file, table and picture, Prometheus metrics, and statistics of requests."""
