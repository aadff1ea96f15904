"""Anthropic's Messages API: the forms of its requests and answers."""
