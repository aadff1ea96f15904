"""Anthropic's Messages API: the formats of its requests and responses."""
