"""Parsers that divide what a model writes into content, reasoning and tool calls."""
