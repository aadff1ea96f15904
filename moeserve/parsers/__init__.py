"""Parsers that split a model's output into content, reasoning and tool calls."""
