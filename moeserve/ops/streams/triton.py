"""Hyper-connections with Triton kernels."""

from __future__ import annotations

from torch import Tensor

from moeserve.ops.streams.interface import StreamsSpec, StreamsWeights
from moeserve.triton_kernels.hyper_connections import collapse_streams, expand_streams

# X width of all streams, C coefficients


class TritonStreams:
    """`StreamKernels` in Triton."""

    def __init__(self, config: StreamsSpec, norm_epsilon: float) -> None:
        self._config = config
        self._norm_epsilon = norm_epsilon

    def collapse(self, streams_TX: Tensor, weights: StreamsWeights) -> tuple[Tensor, Tensor]:
        config = self._config
        return collapse_streams(
            streams_TX,
            weights.map_CX,
            weights.base_C,
            weights.scales,
            num_streams=config.num_streams,
            num_iterations=config.num_iterations,
            epsilon=config.epsilon,
            norm_epsilon=self._norm_epsilon,
        )

    def expand(self, streams_TX: Tensor, update_TD: Tensor, coefficients_TC: Tensor) -> Tensor:
        return expand_streams(streams_TX, update_TD, coefficients_TC, num_streams=self._config.num_streams)
