"""A dense network beside the experts of a layer, with norms around both (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from moeserve.layers.context import ModelContext
from moeserve.layers.norm import RMSNorm

# t this tp rank's share of a step's tokens, D model width


@dataclass(frozen=True)
class ParallelRows:
    """The same rows of the residual stream, normalised for each of their readers, [t, D] each."""

    dense_tD: Tensor
    router_tD: Tensor
    experts_tD: Tensor


class ParallelNorms(nn.Module):
    """The norms of all readers of the residual stream. It has the interface of `RMSNorm`."""

    def __init__(self, hidden_size: int, norm_epsilon: float, context: ModelContext) -> None:
        super().__init__()
        self.dense = RMSNorm(hidden_size, norm_epsilon, context)
        self.router = RMSNorm(hidden_size, norm_epsilon, context)
        self.experts = RMSNorm(hidden_size, norm_epsilon, context)

    @property
    def weight(self) -> Tensor:
        """The weight of the dense network's norm."""
        return self.dense.weight

    def after_adding(self, update_tD: Tensor | None, hidden_tD: Tensor) -> tuple[Tensor, ParallelRows]:
        """Return hidden + update (hidden alone if update is None), and that sum normalised."""
        sum_tD, dense_tD = self.dense.after_adding(update_tD, hidden_tD)
        return sum_tD, ParallelRows(dense_tD, self.router(sum_tD), self.experts(sum_tD))


class ParallelOutputs(nn.Module):
    """The sum of the outputs of both networks, each of which is normalised before."""

    def __init__(self, hidden_size: int, norm_epsilon: float, context: ModelContext) -> None:
        super().__init__()
        self.dense_norm = RMSNorm(hidden_size, norm_epsilon, context)
        self.experts_norm = RMSNorm(hidden_size, norm_epsilon, context)
        self._add = context.kernels.add

    def forward(self, dense_tD: Tensor, experts_tD: Tensor) -> Tensor:
        sum_tD: Tensor = self._add(self.dense_norm(dense_tD), self.experts_norm(experts_tD))
        return sum_tD
