"""A dense network beside the experts of a layer, with norms around both (Gemma 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.layers.dense.network import DenseSpec
from moeserve.layers.moe.layer import MoELayer, MoESpec
from moeserve.layers.network import Build, FeedForwardSpec, Network, NetworkPart, Run, Stages
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rows import At, Row
from moeserve.ops import rows as row_operations


@dataclass(frozen=True)
class ParallelRows:
    """The same rows of the residual stream, normalised for each of their readers, [t, D] each."""

    dense_tD: Tensor
    router_tD: Tensor
    experts_tD: Tensor


@dataclass(frozen=True, kw_only=True)
class BesideSpec(FeedForwardSpec):
    """The shape of a dense network and experts that read the residual stream side by side."""

    has_dense = True

    dense: DenseSpec
    experts: MoESpec

    @property
    def moe(self) -> MoESpec:
        return self.experts

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="a dense network beside the experts")

    def entry_norm(self, build: Build) -> ParallelNorms:
        return ParallelNorms(build)

    def build(self, build: Build) -> Beside:
        return Beside(self, build)


class ParallelNorms(nn.Module):
    """The norms of all readers of the residual stream."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.dense, self.router, self.experts = (_norm(build) for _ in range(3))

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of these norms."""
        yield from self.dense.rows(at)
        yield from self.router.rows(at.under("router"))
        yield from self.experts.rows(at.under("experts"))

    def after_adding(self, update_tD: Tensor | None, hidden_tD: Tensor) -> tuple[Tensor, ParallelRows]:
        """Return hidden + update (hidden alone if update is None), and that sum normalised for each reader."""
        sum_tD, dense_tD = self.dense.after_adding(update_tD, hidden_tD)
        return sum_tD, ParallelRows(dense_tD, self.router(sum_tD), self.experts(sum_tD))


class Beside(Network):
    """The sum of the outputs of the dense network and of the experts. Each output is normalised first."""

    waits = True

    @property
    def moe(self) -> MoELayer:
        return self.experts

    def __init__(self, config: BesideSpec, build: Build) -> None:
        super().__init__()
        self.hidden_size = build.hidden_size
        self.dense = config.dense.build(build)
        self.experts = config.experts.build(build)
        self.dense_norm, self.experts_norm = _norm(build), _norm(build)
        self._add = row_operations.make(build.context.backend).add

    def parts(self) -> Iterator[NetworkPart]:
        yield from self.dense.parts()
        yield from self.experts.parts()
        yield NetworkPart("norms", self.dense_norm)
        yield NetworkPart("norms", self.experts_norm)

    def rows(self, at: At) -> Iterator[Row]:
        yield from self.dense.rows(at)
        yield from self.experts.rows(at, self.hidden_size**-0.5)  # Gemma 4 scales the router's inputs by it
        yield from self.dense_norm.rows(at.under("dense_output_norm"))
        yield from self.experts_norm.rows(at.under("experts_output_norm"))

    def stages(self, rows: ParallelRows, run: Run, cache: Any) -> Stages[Tensor]:
        dense_tD = self.dense(rows.dense_tD, run, None)
        experts_tD = yield from self.experts.stages(rows.experts_tD, run, None, rows.router_tD)
        sum_tD: Tensor = self._add(self.dense_norm(dense_tD), self.experts_norm(experts_tD))
        return sum_tD


def _norm(build: Build) -> RMSNorm:
    return RMSNorm(build.hidden_size, build.norm_epsilon, build.context)
