"""The residual stream as one row for each token, and the place of a network on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.layers.network import Build
from moeserve.layers.norm import LayerNorm, NoNorm, RMSNorm, RowsForm, ScaledFirstNorm
from moeserve.layers.rows import At, Row, whole
from moeserve.ops import rows


class Place(nn.Module):
    """The place of a network on the residual stream."""

    norm: Any  # the module before the network, with `after_adding`

    def enter(self, stream: Any, update_tD: Tensor | None) -> tuple[Any, Any]:
        """Return the stream with the previous network's update, and the rows for this place's network.

        The addition is fused with the norm before the network, which reads the sum anyway.
        """
        raise NotImplementedError

    def leave(self, stream: Any, update_tD: Tensor) -> tuple[Any, Tensor | None]:
        """Return the stream after the network, and the update that is still to be added; None: no update is left."""
        raise NotImplementedError

    def close(self, stream: Any, update_tD: Tensor | None) -> Tensor:
        """Return the stream with the update added, for the next pipeline stage."""
        raise NotImplementedError

    def rows(self, at: At, norm_name: str, output_norm_name: str) -> Iterator[Row]:
        """Yield the weight mapping of this place.

        Args:
            at: the place of the layer.
            norm_name: the name of the norm before the network.
            output_norm_name: the name of the norm of the network's output.
        """
        raise NotImplementedError


class NormSpec(Protocol):
    """A kind of norm before a network."""

    def build(self, build: Build, form: RowsForm) -> nn.Module:
        """Return the norm. `form` is the form of the rows that the network reads."""
        ...


@dataclass(frozen=True)
class NormOfSum:
    """An RMSNorm of the residual stream divided by the root of the number of its terms (Beam).

    The stream here is the undivided sum of the terms. An RMSNorm depends on such a factor only through epsilon, so
    epsilon is multiplied by the number of terms instead.
    """

    num_terms: int

    def build(self, build: Build, form: RowsForm) -> nn.Module:
        return RMSNorm(build.hidden_size, build.norm_epsilon * self.num_terms, build.context, form)


@dataclass(frozen=True)
class NormWithEpsilon:
    """An RMSNorm with an epsilon of its own."""

    epsilon: float

    def build(self, build: Build, form: RowsForm) -> nn.Module:
        return RMSNorm(build.hidden_size, self.epsilon, build.context, form)


@dataclass(frozen=True, kw_only=True)
class PlaceSpec:
    """The connection of a network to the residual stream."""

    entry_norm: nn.Module | None = None  # the norm before the network; None: the stream makes the norm
    has_norm: bool  # False: the network reads the stream as it is, in plain rows
    is_normed: bool  # the network's output is normalised
    is_scaled: bool  # the stream is multiplied by a learned number behind the network


class StreamSpec(Protocol):
    """A kind of residual stream."""

    @property
    def width(self) -> int:
        """The width of the stream, as a multiple of the model's width."""
        ...

    @property
    def needs(self) -> Needs:
        """The demands of the stream on the settings."""
        ...

    def place(self, build: Build, form: RowsForm, spec: PlaceSpec) -> Place:
        """Return the place of a network. `form` is the form of the rows that the network reads."""
        ...

    def last(self, build: Build) -> Place:
        """Return the place after all networks, whose rows are the model's hidden states."""
        ...

    def start(self, hidden_tD: Tensor) -> Any:
        """Return a stream that begins with embedded tokens, or with the rows that the previous pipeline stage sent."""
        ...


@dataclass(frozen=True)
class PlainStream:
    """A stream of one row for each token."""

    has_layer_norms: bool = False  # the norms are LayerNorms
    has_norm_biases: bool = True  # LayerNorms have biases
    last_norm: NormSpec | None = None  # the norm after all networks; None: the same kind as before networks
    width: int = 1

    @property
    def needs(self) -> Needs:
        return Needs(without_gpu_kernels="LayerNorm" if self.has_layer_norms else None)

    def place(self, build: Build, form: RowsForm, spec: PlaceSpec) -> Residual:
        norm = spec.entry_norm or (self.norm(build, form) if spec.has_norm else NoNorm(build.context))
        output_norm = RMSNorm(build.hidden_size, build.norm_epsilon, build.context) if spec.is_normed else None
        return (ScaledResidual if spec.is_scaled else Residual)(norm, output_norm, build)

    def last(self, build: Build) -> Residual:
        norm = self.norm(build, "plain") if self.last_norm is None else self.last_norm.build(build, "plain")
        return Residual(norm, None, build)

    def start(self, hidden_tD: Tensor) -> Tensor:
        return hidden_tD

    def norm(self, build: Build, form: RowsForm) -> nn.Module:
        """Return a norm before a network."""
        size, epsilon = build.hidden_size, build.norm_epsilon
        if self.has_layer_norms:
            return LayerNorm(size, epsilon, build.context, has_bias=self.has_norm_biases)
        return RMSNorm(size, epsilon, build.context, form)


class Residual(Place):
    """The place of a network with a norm before the network, and perhaps a norm of the network's output."""

    def __init__(self, norm: nn.Module, output_norm: RMSNorm | ScaledFirstNorm | None, build: Build) -> None:
        super().__init__()
        self.norm = norm
        self.output_norm = output_norm
        self._add = rows.make(build.context.backend).add

    def enter(self, stream_tD: Tensor, update_tD: Tensor | None) -> tuple[Tensor, Any]:
        entered: tuple[Tensor, Any] = self.norm.after_adding(update_tD, stream_tD)
        return entered

    def leave(self, stream_tD: Tensor, update_tD: Tensor) -> tuple[Tensor, Tensor | None]:
        return stream_tD, update_tD if self.output_norm is None else self.output_norm(update_tD)

    def close(self, stream_tD: Tensor, update_tD: Tensor | None) -> Tensor:
        if update_tD is None:
            return stream_tD
        closed_tD: Tensor = self._add(stream_tD, update_tD)  # same bytes as the addition in the next norm
        return closed_tD

    def rows(self, at: At, norm_name: str, output_norm_name: str) -> Iterator[Row]:
        yield from self.norm.rows(at.under(norm_name))
        if self.output_norm is not None:
            yield from self.output_norm.rows(at.under(output_norm_name))


class ScaledResidual(Residual):
    """The place of a network after which the stream is multiplied by a learned number."""

    def __init__(self, norm: nn.Module, output_norm: RMSNorm | None, build: Build) -> None:
        super().__init__(norm, output_norm, build)
        self.factor = build.context.parameter(1, dtype=torch.float32)
        self._add_scaled = rows.make(build.context.backend).add_scaled

    def leave(self, stream_tD: Tensor, update_tD: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.output_norm is not None:
            update_tD = self.output_norm(update_tD)
        return self._add_scaled(stream_tD, update_tD, self.factor), None

    def rows(self, at: At, norm_name: str, output_norm_name: str) -> Iterator[Row]:
        yield from super().rows(at, norm_name, output_norm_name)
        yield at("layer_scalar"), whole(self.factor)
