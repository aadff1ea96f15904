"""The mixture-of-experts layer: who computes which token, where, and how the pieces come back together."""
