"""OpenAI's API: the forms of its requests and answers."""
