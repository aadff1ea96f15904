"""Normalisation of rows: by the root mean square, and LayerNorm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moeserve.layers.build_context import BuildContext
from moeserve.layers.rows import At, Row, whole
from moeserve.ops import rows

RowsForm = Literal["plain", "float8", "both"]  # "both": `Float8Rows` that keep the plain rows


class RMSNorm(nn.Module):
    """Scales each row to unit mean square, then by a learned weight per column.

    Args:
        has_weight: False: all weights are one.
        form: the form of the normalised rows that `after_adding` returns.
    """

    def __init__(
        self,
        hidden_size: int,
        epsilon: float,
        context: BuildContext,
        form: RowsForm = "plain",
        *,
        has_weight: bool = True,
    ) -> None:
        super().__init__()
        # A norm without a weight multiplies by ones, which no checkpoint fills.
        ones_D = torch.ones(hidden_size, dtype=context.dtype, device=context.device)
        self.weight: Tensor = context.parameter(hidden_size) if has_weight else ones_D
        self.epsilon = epsilon
        operations = rows.make(context.backend)
        self._rms_norm = operations.rms_norm
        self._rms_norm_in_place = operations.rms_norm_in_place
        self._add_rms_norm = operations.add_rms_norm
        self._quantize = None if form == "plain" else operations.quantize_rms_norm
        self._keeps_rows = form == "both"

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return self._rms_norm(hidden_TD, self.weight, self.epsilon)

    def in_place(self, hidden_TD: Tensor) -> None:
        """Normalise hidden states in place. The tensor may be a view of a wider tensor."""
        self._rms_norm_in_place(hidden_TD, self.weight, self.epsilon)

    def after_adding(self, update_TD: Tensor | None, hidden_TD: Tensor) -> tuple[Tensor, Any]:
        """Return hidden + update (hidden alone if update is None), and that sum normalised."""
        if self._quantize is not None:
            return self._quantize(hidden_TD, update_TD, self.weight, self.epsilon, self._keeps_rows)
        if update_TD is None:
            return hidden_TD, self(hidden_TD)
        return self._add_rms_norm(hidden_TD, update_TD, self.weight, self.epsilon)

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module: empty if it has no weight."""
        if isinstance(self.weight, nn.Parameter):
            yield at("weight"), whole(self.weight, offset=at.norm_offset)


class ScaledFirstNorm(nn.Module):
    """Multiplies each row by a learned weight per column, then scales it to unit mean square (Muse Spark)."""

    def __init__(self, size: int, epsilon: float, context: BuildContext) -> None:
        super().__init__()
        self.weight = context.parameter(size, dtype=torch.float32)
        self.norm = RMSNorm(size, epsilon, context, has_weight=False)

    def forward(self, rows_TD: Tensor) -> Tensor:
        return self.norm((rows_TD * self.weight).to(rows_TD.dtype))

    def in_place(self, rows_TD: Tensor) -> None:
        """Normalise rows in place."""
        self.norm.in_place(rows_TD.mul_(self.weight))

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module."""
        yield at("weight"), whole(self.weight, offset=at.norm_offset)


class NormAfterEmbedding(nn.Module):
    """The norm before the first network of a model whose embedded tokens are normalised as well."""

    def __init__(
        self,
        hidden_size: int,
        epsilon: float,
        context: BuildContext,
        form: RowsForm = "plain",
        *,
        has_weight: bool = True,
    ) -> None:
        """
        Args:
            has_weight: False: the norm of embedded tokens has no weight.
        """
        super().__init__()
        self.of_embedding = RMSNorm(hidden_size, epsilon, context, has_weight=has_weight)
        self.norm = RMSNorm(hidden_size, epsilon, context, form)

    def after_adding(self, update_TD: Tensor | None, hidden_TD: Tensor) -> tuple[Tensor, Any]:
        """Return the normalised embedded tokens, and the rows for the first network, which are normalised again."""
        assert update_TD is None
        return self.norm.after_adding(None, self.of_embedding(hidden_TD))

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of both norms."""
        yield from self.of_embedding.rows(at.under("embedding"))
        yield from self.norm.rows(at)


class LayerNorm(nn.Module):
    """Scales each row to mean zero and unit variance, then by a learned weight per column, and adds a bias.

    Args:
        has_bias: False: the bias is zero.
    """

    def __init__(self, hidden_size: int, epsilon: float, context: BuildContext, *, has_bias: bool = True) -> None:
        super().__init__()
        self.weight = context.parameter(hidden_size)
        zeros_D = torch.zeros(hidden_size, dtype=context.dtype, device=context.device)
        self.bias: Tensor = context.parameter(hidden_size) if has_bias else zeros_D
        self.epsilon = epsilon
        operations = rows.make(context.backend)
        self._add = operations.add
        self._layer_norm = operations.layer_norm

    def after_adding(self, update_TD: Tensor | None, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden + update (hidden alone if update is None), and that sum normalised."""
        sum_TD = hidden_TD if update_TD is None else self._add(hidden_TD, update_TD)
        return sum_TD, self._layer_norm(sum_TD, self.weight, self.bias, self.epsilon)

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module: the weight, and the bias if there is one."""
        yield at("weight"), whole(self.weight, offset=at.norm_offset)
        if isinstance(self.bias, nn.Parameter):
            yield at("bias"), whole(self.bias)


class NoNorm(nn.Module):
    """Leaves rows as they are."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self._add = rows.make(context.backend).add

    def after_adding(self, update_TD: Tensor | None, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden + update (hidden alone if update is None), twice."""
        sum_TD = hidden_TD if update_TD is None else self._add(hidden_TD, update_TD)
        return sum_TD, sum_TD

    def rows(self, at: At) -> Iterator[Row]:
        """Yield nothing: there are no weights."""
        yield from ()
