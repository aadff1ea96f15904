"""Ways to bring tokens to their experts and back."""
