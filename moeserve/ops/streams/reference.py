"""Hyper-connections in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.streams.interface import StreamsSpec, StreamsWeights

# S streams, X = S * D, C coefficients


class TorchStreams:
    """`StreamKernels` in plain torch."""

    def __init__(self, config: StreamsSpec, norm_epsilon: float) -> None:
        self.config = config
        self.norm_epsilon = norm_epsilon

    def collapse(self, streams_TX: Tensor, weights: StreamsWeights) -> tuple[Tensor, Tensor]:
        config, wide_TX = self.config, streams_TX.float()
        num_streams = config.num_streams
        normed_TX = wide_TX * (wide_TX.square().mean(dim=-1, keepdim=True) + self.norm_epsilon).rsqrt()
        mapped_TC = functional.linear(normed_TX, weights.map_CX)
        sizes = [num_streams, num_streams, num_streams**2][: len(weights.scales)]
        parts = zip(mapped_TC.split(sizes, dim=1), weights.base_C.split(sizes), weights.scales, strict=True)
        before_TS, *others = (part * scale + base for part, base, scale in parts)
        before_TS = before_TS.sigmoid() + config.epsilon
        collapsed_TD = (before_TS[..., None] * wide_TX.unflatten(1, (num_streams, -1))).sum(dim=1)
        coefficients = [before_TS]
        if others:
            coefficients += [config.output_factor * others[0].sigmoid() + config.output_epsilon]
        if len(others) == 2:
            mix_TSS = others[1].unflatten(1, (num_streams, num_streams))
            coefficients += [self._doubly_stochastic(mix_TSS).flatten(1)]
        return collapsed_TD.to(streams_TX.dtype), torch.cat(coefficients, dim=1)

    def _doubly_stochastic(self, mix_TSS: Tensor) -> Tensor:
        epsilon = self.config.epsilon
        mix_TSS = mix_TSS.softmax(dim=-1) + epsilon
        mix_TSS = mix_TSS / (mix_TSS.sum(dim=-2, keepdim=True) + epsilon)
        for _ in range(self.config.num_iterations - 1):
            mix_TSS = mix_TSS / (mix_TSS.sum(dim=-1, keepdim=True) + epsilon)
            mix_TSS = mix_TSS / (mix_TSS.sum(dim=-2, keepdim=True) + epsilon)
        return mix_TSS

    def expand(self, streams_TX: Tensor, update_TD: Tensor, coefficients_TC: Tensor) -> Tensor:
        num_streams = self.config.num_streams
        after_TS, mix = coefficients_TC[:, num_streams:].tensor_split([num_streams], dim=1)
        mixed_TSD = streams_TX.float().unflatten(1, (num_streams, -1))
        if self.config.num_iterations:
            mixed_TSD = mix.unflatten(1, (num_streams, num_streams)).transpose(1, 2) @ mixed_TSD
        return (after_TS[..., None] * update_TD.float()[:, None] + mixed_TSD).flatten(1).to(streams_TX.dtype)
