"""An inference engine for mixture-of-experts language models."""

from typing import TYPE_CHECKING, Any

from moeserve.errors import (
    CacheTooSmallError,
    CheckpointError,
    EngineError,
    MoeserveError,
    RequestError,
    SettingsError,
)
from moeserve.outputs import CompletionOutput, Logprob, RequestOutput
from moeserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from moeserve.api.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CacheTooSmallError",
    "CheckpointError",
    "CompletionOutput",
    "EngineError",
    "Logprob",
    "MoeserveError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SettingsError",
]


def __getattr__(name: str) -> Any:
    # LLM imports torch, which takes a second. The command line and the control plane do not need it.
    if name == "LLM":
        from moeserve.api.llm import LLM

        return LLM
    raise AttributeError(f"module 'moeserve' has no attribute {name!r}")
