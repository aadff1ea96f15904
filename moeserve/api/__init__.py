"""The public Python interface: `LLM`, prompts, tokenizers, and the text of outputs."""
