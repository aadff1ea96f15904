"""Names that vLLM has in `vllm.v1.engine.async_llm`."""

from moeserve import AsyncLLM

__all__ = ["AsyncLLM"]
