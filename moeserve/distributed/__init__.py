"""The mesh of ranks, its groups, and the collectives by which they exchange tensors."""
