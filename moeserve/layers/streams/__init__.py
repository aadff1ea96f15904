"""Several residual streams (hyper-connections)."""
