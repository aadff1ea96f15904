"""The HTTP server, which speaks OpenAI's API. It uses `AsyncLLM`, with the engine in processes of its own."""
