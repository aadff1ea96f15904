"""Attention to a window of tokens and to compressed entries (DeepSeek-V4)."""
