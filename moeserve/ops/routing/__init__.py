"""The choice of each token's experts, and of their copies."""
