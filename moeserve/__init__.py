"""An inference engine for mixture-of-experts language models."""

import gc
import importlib
import sys
from typing import TYPE_CHECKING, Any

from moeserve.errors import (
    CacheTooSmallError,
    CheckpointError,
    EngineError,
    MoeserveError,
    QueueFullError,
    RequestError,
    ScaleError,
    ScalingInProgressError,
    SettingsError,
    StaleWeightsError,
    UnsupportedError,
    WeightsChangedError,
    WeightUpdateError,
)

if TYPE_CHECKING:
    from moeserve.api.async_llm import AsyncLLM
    from moeserve.api.async_llm import AsyncLLM as AsyncLLMEngine
    from moeserve.api.beam_search import BeamSearchOutput, BeamSearchSequence
    from moeserve.api.llm import LLM
    from moeserve.api.llm_engine import LLMEngine
    from moeserve.cli.engine_args import AsyncEngineArgs, EngineArgs
    from moeserve.inputs import TextPrompt, TokensPrompt
    from moeserve.outputs import CompletionOutput, Logprob, RequestOutput
    from moeserve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from moeserve.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CacheTooSmallError",
    "CheckpointError",
    "CompletionOutput",
    "EngineArgs",
    "EngineError",
    "LLMEngine",
    "Logprob",
    "MoeserveError",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScaleError",
    "ScalingInProgressError",
    "SettingsError",
    "StaleWeightsError",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedError",
    "WeightUpdateError",
    "WeightsChangedError",
]


# Modules are imported when a name is first used: `LLM` imports torch, which takes a second, and kernels are checked on
# machines without msgspec.
_MODULES = {
    "LLM": "moeserve.api.llm",
    "AsyncEngineArgs": "moeserve.cli.engine_args",
    "AsyncLLM": "moeserve.api.async_llm",
    "AsyncLLMEngine": "moeserve.api.async_llm",
    "BeamSearchOutput": "moeserve.api.beam_search",
    "BeamSearchParams": "moeserve.sampling_params",
    "BeamSearchSequence": "moeserve.api.beam_search",
    "EngineArgs": "moeserve.cli.engine_args",
    "LLMEngine": "moeserve.api.llm_engine",
    "TextPrompt": "moeserve.inputs",
    "TokensPrompt": "moeserve.inputs",
    "CompletionOutput": "moeserve.outputs",
    "Logprob": "moeserve.outputs",
    "RequestOutput": "moeserve.outputs",
    "RequestOutputKind": "moeserve.sampling_params",
    "SamplingParams": "moeserve.sampling_params",
    "StructuredOutputsParams": "moeserve.structured_outputs",
}


def _import(module: str) -> None:
    """Import a module with few garbage collections meanwhile.

    Importing torch creates half a million objects, none of which is garbage, and Python by default collects after every
    700 new objects. Garbage from before is collected first. Objects that exist after the import are frozen: later
    collections skip them, because visiting all of them would take 0.1 s each time.
    """
    gc.collect()
    thresholds = gc.get_threshold()
    gc.set_threshold(thresholds[0] and 50_000, *thresholds[1:])
    try:
        importlib.import_module(module)
    finally:
        gc.set_threshold(*thresholds)
    gc.freeze()


if not TYPE_CHECKING:  # otherwise type checkers would accept every name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            if _MODULES[name] not in sys.modules:
                _import(_MODULES[name])
            return getattr(sys.modules[_MODULES[name]], name)
        raise AttributeError(f"module 'moeserve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
