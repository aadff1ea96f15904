"""moeserve under the names that TRL imports from vLLM. Put the folder above this package on PYTHONPATH.

TRL pushes weights tensor by tensor, and then resets the prefix cache. Here the tensors are collected, and the reset
updates all weights at once. Between the two, TRL does not generate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

import moeserve
from moeserve import AsyncLLM, LLMEngine, RequestOutput
from moeserve.rl import WeightSender
from vllm.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["LLM", "AsyncLLM", "LLMEngine", "RequestOutput", "RequestOutputKind", "SamplingParams"]
__version__ = "0.31.0"  # the version of vLLM whose names these are


class ColocatedLLM(moeserve.LLM):
    """A `moeserve.LLM` that takes weights as a worker of vLLM does."""

    def __init__(
        self,
        model: str,
        *,
        distributed_executor_backend: str | None = None,
        gpu_memory_utilization: float | None = None,
        model_impl: str = "auto",
        tensor_parallel_size: int = 1,
        **settings: Any,
    ) -> None:
        """
        Args:
            distributed_executor_backend: "external_launcher": each process of the trainer has an engine of its own.
            gpu_memory_utilization, model_impl: no effect.
            tensor_parallel_size: 1.
            settings: those of moeserve.
        """
        if distributed_executor_backend == "external_launcher" and tensor_parallel_size != 1:
            raise moeserve.SettingsError(
                f"tensor_parallel_size={tensor_parallel_size}: processes of a trainer cannot share an engine; use 1"
            )
        super().__init__(model, tensor_parallel_size=tensor_parallel_size, rl=True, **settings)
        self.on_new_weights: Callable[[], None] = lambda: None  # called after each update
        self._received: dict[str, Tensor] = {}
        self._sender = WeightSender(self)
        self._num_updates = 0

    @functools.cached_property
    def llm_engine(self) -> Any:
        engine: Any = super().llm_engine
        model = SimpleNamespace(load_weights=self._load_weights)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        engine.model_executor = SimpleNamespace(driver_worker=worker)
        engine.model_config = SimpleNamespace(max_model_len=self.config.schedule.max_model_len)
        return engine

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Update the weights with the tensors that have come. The prefixes of old weights are not found any more."""
        if self._received:
            received, self._received = self._received, {}
            self._num_updates += 1
            self._sender.send(received, str(self._num_updates))
            self.on_new_weights()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        given = dict(weights)
        self._received |= given
        return {*given}


LLM = ColocatedLLM
