"""OpenAI's API: the formats of its requests and responses."""
