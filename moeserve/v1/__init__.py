"""Names that vLLM has in `vllm.v1`."""
