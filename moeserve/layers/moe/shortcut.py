"""Experts on a shortcut around two dense networks (ScMoE, arXiv 2404.05019).

The experts read the input of the first dense network, and their output is added after the second. The experts run
before the first dense network, so that the two halves of a step can overlap there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moeserve.layers.dense.network import DenseSpec
from moeserve.layers.moe.layer import MoELayer, MoESpec
from moeserve.layers.network import Build, FeedForwardSpec, Network, NetworkPart, Run, Stages
from moeserve.layers.rows import At, Row
from moeserve.ops import rows as row_operations


@dataclass
class Shortcut:
    """The output of the experts, on its way to the network that adds it."""

    output_tD: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ShortcutStartSpec(FeedForwardSpec):
    """The shape of a dense network, and of the experts that read the same rows."""

    has_dense = True

    dense: DenseSpec
    experts: MoESpec

    @property
    def moe(self) -> MoESpec:
        return self.experts

    def build(self, build: Build) -> ShortcutStart:
        return ShortcutStart(self, build)


@dataclass(frozen=True, kw_only=True)
class ShortcutEndSpec(FeedForwardSpec):
    """The shape of the dense network after which the output of the experts is added."""

    has_dense = True

    dense: DenseSpec

    def build(self, build: Build) -> ShortcutEnd:
        return ShortcutEnd(self, build)


class ShortcutStart(Network):
    """The first dense network, and the experts, which read the same rows."""

    waits = True

    def __init__(self, config: ShortcutStartSpec, build: Build) -> None:
        super().__init__()
        self.dense = config.dense.build(build)
        self.experts = config.experts.build(build)

    @property
    def moe(self) -> MoELayer:
        return self.experts

    def parts(self) -> Iterator[NetworkPart]:
        yield from self.dense.parts()
        yield from self.experts.parts()

    def rows(self, at: At) -> Iterator[Row]:
        yield from self.dense.rows(at)
        yield from self.experts.rows(at.under("moe"))

    def stages(self, rows: Tensor, run: Run, cache: Any) -> Stages[Tensor]:
        output_tD = yield from self.experts.stages(rows, run)
        # A copy: DeepEP's low-latency kernels have memory for only two results.
        run.shared(Shortcut).output_tD = output_tD.clone() if output_tD.is_cuda else output_tD
        dense_tD: Tensor = self.dense(rows, run, None)
        return dense_tD


class ShortcutEnd(Network):
    """The sum of a dense network's output and the experts' output."""

    def __init__(self, config: ShortcutEndSpec, build: Build) -> None:
        super().__init__()
        self.dense = config.dense.build(build)
        self._add = row_operations.make(build.context.backend).add

    def parts(self) -> Iterator[NetworkPart]:
        return self.dense.parts()

    def rows(self, at: At) -> Iterator[Row]:
        return self.dense.rows(at)

    def forward(self, rows: Tensor, run: Run, cache: Any) -> Tensor:
        shortcut = run.shared(Shortcut)
        output_tD, shortcut.output_tD = shortcut.output_tD, None
        assert output_tD is not None
        sum_tD: Tensor = self._add(self.dense(rows, run, None), output_tD)
        return sum_tD
