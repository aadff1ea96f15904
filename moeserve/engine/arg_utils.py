"""Names that vLLM has in `vllm.engine.arg_utils`."""

from moeserve import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
