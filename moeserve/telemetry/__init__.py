"""What is recorded of a run, and how people and monitors see it."""
