"""Attention to a window and to compressed entries (DeepSeek-V4)."""
