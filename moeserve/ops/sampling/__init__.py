"""The choice of the next tokens from logits."""
