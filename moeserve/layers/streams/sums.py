"""Sums of the updates of blocks of layers, to which every network attends instead of reading one stream (Inkling 2).

The embedded tokens are the first sum. The layers of a block add their updates to one sum; the first update of the next
block begins a new sum. Before a network, learned queries attend to all sums of a token (attention residuals).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.layers.network import Build
from moeserve.layers.norm import RMSNorm, RowsForm
from moeserve.layers.rows import At, Row, whole
from moeserve.layers.streams.residual import Place, PlaceSpec
from moeserve.ops import mixing

# S sums, X = S * D, Q queries


class Sums(NamedTuple):
    """The sums of each token, side by side. The sums of blocks that have not begun hold arbitrary numbers."""

    values_tX: Tensor
    last: int  # index of the sum that updates are added to


@dataclass(frozen=True)
class SumsStream:
    """A residual stream that consists of the sums of blocks of layers.

    A network without a norm reads the previous network's update, and replaces that update by its own.
    """

    width: int  # number of sums

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="attention to sums of blocks of layers")

    def place(self, build: Build, form: RowsForm, spec: PlaceSpec) -> SumsPlace:
        assert not spec.is_normed
        assert not spec.is_scaled
        if not spec.has_norm:
            return SumsPlace(build)
        assert isinstance(spec.entry_norm, SumsNorm)
        return AttendingPlace(spec.entry_norm, build)

    def last(self, build: Build) -> AttendingPlace:
        return AttendingPlace(SumsNormSpec(self.width).build(build, "plain"), build)

    def start(self, hidden_tX: Tensor) -> Sums:
        """Return the sums that the previous pipeline stage has sent; on the first stage, the embedded tokens."""
        return Sums(hidden_tX, 0)


@dataclass(frozen=True)
class SumsNormSpec:
    """The shape of the attention with which a network reads sums."""

    num_sums: int  # number of sums that have begun
    begins_sum: bool = False  # the update before the network is the first update of the last sum
    names: tuple[str, ...] = ()  # names of the norms of several inputs, each with its own query; (): one input
    follows_embedding: bool = False  # the network reads the embedded tokens, which are normalised first

    def build(self, build: Build, form: RowsForm) -> SumsNorm:
        """Return the queries and norms."""
        return SumsNorm(self, build, form)


class SumsNorm(nn.Module):
    """The queries with which a network attends to sums, and the norms of the results."""

    def __init__(self, config: SumsNormSpec, build: Build, form: RowsForm) -> None:
        super().__init__()
        self.config, size, epsilon = config, build.hidden_size, build.norm_epsilon
        num_inputs = max(1, len(config.names))
        self.norms = [RMSNorm(size, epsilon, build.context, form) for _ in range(num_inputs)]
        self.registered_norms = nn.ModuleList(self.norms)
        has_queries = not config.follows_embedding
        self.of_embedding = None if has_queries else RMSNorm(size, epsilon, build.context)
        self.queries = build.context.parameter(num_inputs, size, dtype=torch.float32) if has_queries else None

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module."""
        for name, norm in zip(self.config.names or (None,), self.norms, strict=True):
            yield from norm.rows(at if name is None else at.under(name))
        if self.of_embedding is not None:
            yield from self.of_embedding.rows(at.under("embedding"))
        if self.queries is not None:
            yield at("query"), whole(self.queries if self.config.names else self.queries[0])


class SumsPlace(Place):
    """The place of a network whose input is the output of the network before it, not the stream."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.hidden_size = build.hidden_size
        self._attend = mixing.make(build.context.backend).attend_sums

    def enter(self, stream: Sums, update_tD: Tensor | None) -> tuple[Sums, Any]:
        assert update_tD is not None
        return stream, update_tD

    def leave(self, stream: Sums, update_tD: Tensor) -> tuple[Sums, Tensor]:
        return stream, update_tD

    def close(self, stream: Sums, update_tD: Tensor | None) -> Tensor:
        self.attend(stream, update_tD, begins=False, queries_QD=None)
        return stream.values_tX

    def attend(
        self, stream: Sums, update_tD: Tensor | None, *, begins: bool, queries_QD: Tensor | None
    ) -> Tensor | None:
        """Add the update to the last sum. Return the results of the queries' attention to the sums, [t, Q, D]."""
        values_tSD = stream.values_tX.unflatten(1, (-1, self.hidden_size))
        return self._attend(values_tSD, stream.last + 1, update_tD, begins=begins, queries_QD=queries_QD)

    def rows(self, at: At, norm_name: str, output_norm_name: str) -> Iterator[Row]:
        yield from ()


class AttendingPlace(SumsPlace):
    """The place of a network that attends to sums. A network with several inputs reads a tuple of rows."""

    def __init__(self, norm: SumsNorm, build: Build) -> None:
        super().__init__(build)
        self.norm = norm

    def enter(self, stream: Sums, update_tD: Tensor | None) -> tuple[Sums, Any]:
        config, norm = self.norm.config, self.norm
        stream = Sums(stream.values_tX, config.num_sums - 1)
        if norm.of_embedding is not None:
            update_tD = norm.of_embedding(stream.values_tX[:, : self.hidden_size])
            self.attend(stream, update_tD, begins=True, queries_QD=None)
            read = (update_tD,) * len(norm.norms)
        else:
            attended_tQD = self.attend(stream, update_tD, begins=config.begins_sum, queries_QD=norm.queries)
            assert attended_tQD is not None
            read = attended_tQD.unbind(1)
        rows = tuple(each.after_adding(None, of_query)[1] for each, of_query in zip(norm.norms, read, strict=True))
        return stream, rows[0] if len(rows) == 1 else rows

    def rows(self, at: At, norm_name: str, output_norm_name: str) -> Iterator[Row]:
        yield from self.norm.rows(at.under(norm_name))
