"""Decides what runs next. Knows token counts and block ids; no tensors, no files, no clock."""
