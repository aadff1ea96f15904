"""The HTTP server with OpenAI's API. It uses `AsyncLLM`, and the engine runs in other processes."""
