"""What would happen, told without a model or a second machine."""
