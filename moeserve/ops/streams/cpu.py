"""Hyper-connections with C++ kernels."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops.streams.interface import StreamsSpec, StreamsWeights

# X width of all streams, C coefficients


class CpuStreams:
    """`StreamKernels` in C++."""

    def __init__(self, native: ModuleType, config: StreamsSpec, norm_epsilon: float) -> None:
        self._native = native
        self._config = config
        self._norm_epsilon = norm_epsilon

    def collapse(self, streams_TX: Tensor, weights: StreamsWeights) -> tuple[Tensor, Tensor]:
        config, num_tokens = self._config, len(streams_TX)
        collapsed_TD = new_empty(streams_TX, num_tokens, streams_TX.shape[1] // config.num_streams)
        coefficients_TC = torch.empty(num_tokens, len(weights.base_C), dtype=torch.float32)
        self._native.collapse_streams(
            streams_TX,
            weights.map_CX,
            weights.base_C,
            weights.scales,
            coefficients_TC,
            collapsed_TD,
            num_streams=config.num_streams,
            num_iterations=config.num_iterations,
            epsilon=config.epsilon,
            norm_epsilon=self._norm_epsilon,
            output_factor=config.output_factor,
            output_epsilon=config.output_epsilon,
        )
        return collapsed_TD, coefficients_TC

    def expand(self, streams_TX: Tensor, update_TD: Tensor, coefficients_TC: Tensor) -> Tensor:
        out_TX = new_empty(streams_TX, *streams_TX.shape)
        num_streams = self._config.num_streams
        self._native.expand_streams(streams_TX, update_TD, coefficients_TC, out_TX, num_streams=num_streams)
        return out_TX
