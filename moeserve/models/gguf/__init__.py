"""GGUF files, read as checkpoints."""
