"""Projections, the token embedding, and the output head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeserve.distributed.mesh import share_of, share_sizes
from moeserve.layers.build_context import BuildContext
from moeserve.layers.rows import At, Row, some_columns, some_rows, whole
from moeserve.layers.weights import DEFAULT_LIMITS, QuantizationLimits, Weights
from moeserve.memory import new_empty
from moeserve.ops import products
from moeserve.ops.products.interface import InputChunks
from moeserve.ops.rows.interface import Rows

# v this rank's share of the vocabulary V


class Linear(nn.Module):
    """output_TO = input_TI @ weight_OI.T + bias_O"""

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        context: BuildContext,
        *,
        has_bias: bool = False,
        limits: QuantizationLimits = DEFAULT_LIMITS,
        chunks: InputChunks | None = None,
    ) -> None:
        super().__init__()
        shape = 1, num_outputs, num_inputs
        self.weights = Weights(products.SINGLE, shape, context, has_bias=has_bias, limits=limits, chunks=chunks)

    @property
    def weight(self) -> Tensor:
        """The weight [O, I]. Not available after packing."""
        return self.weights.open.weight_eOI[0]

    @property
    def bias(self) -> Tensor | None:
        return None if self.weights.bias is None else self.weights.bias[0]

    def forward(self, input_TI: Rows) -> Tensor:
        """Return the projected rows [T, O]. Only weights in 8-bit blocks accept `Float8Rows`."""
        output_TO: Tensor = self.weights.product.multiply(input_TI)
        return output_TO

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of a projection that is whole on every rank."""
        yield at("weight"), whole(self.weight, self.weights)
        if self.bias is not None:
            yield at("bias"), whole(self.bias)

    def summed_rows(self, at: At, share: slice, num_columns: int, *, has_bias: bool) -> Iterator[Row]:
        """Yield the weight mapping of a projection whose columns tp ranks divide. Only one rank adds the bias.

        Args:
            share: this rank's range of the `num_columns` columns.
        """
        yield at("weight"), some_columns(self.weight, share, num_columns, self.weights)
        if has_bias:
            yield at("bias"), None if self.bias is None else whole(self.bias)


class SideBySide(nn.Module):
    """Several projections, each with its own input, whose outputs lie side by side in one tensor."""

    def __init__(self, num_inputs: int, sizes: Sequence[int], context: BuildContext) -> None:
        super().__init__()
        shapes, limits = ((1, size, num_inputs) for size in sizes), QuantizationLimits(8, None)
        self.parts = [Weights(products.PER_HEAD, shape, context, limits=limits) for shape in shapes]
        self.registered_parts = nn.ModuleList(self.parts)
        self.sizes = list(sizes)

    def forward(self, inputs_TI: Sequence[Tensor]) -> Tensor:
        """Return the outputs of all parts [T, O], given an input [T, I] for each part."""
        out_TO = new_empty(inputs_TI[0], len(inputs_TI[0]), sum(self.sizes))
        parts = zip(self.parts, inputs_TI, out_TO[:, None].split(self.sizes, dim=2), strict=True)
        for weights, input_TI, part_T1O in parts:
            weights.product.multiply(input_TI[:, None], part_T1O)
        return out_TO

    def rows(self, at: At, *parts: tuple[str, slice, int]) -> Iterator[Row]:
        """Yield the weight mapping. Each part is a name, this rank's range of rows, and the rows of all ranks."""
        for weights, (name, share, num_rows) in zip(self.parts, parts, strict=True):
            yield at(f"{name}.weight"), some_rows(weights.open.weight_eOI[0], share, num_rows, weights)


class Embedding(nn.Module):
    """One row of a table for each token id. Each tp rank has a share of the vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int, context: BuildContext, *, factor: float = 1.0) -> None:
        """
        Args:
            factor: multiplies the rows.
        """
        super().__init__()
        self.tp = context.tp
        self.factor = factor
        self.share = share_of(vocab_size, self.tp.rank_in_group, self.tp.world_size)
        self.weight = context.parameter(self.share.stop - self.share.start, hidden_size)

    def forward(self, token_ids_T: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the rows [t, D] of this rank's share of the tokens. `sizes`: number of tokens of each tp rank."""
        hidden_tD = self._rows(token_ids_T, sizes)
        return hidden_tD if self.factor == 1.0 else hidden_tD * self.factor

    def _rows(self, token_ids_T: Tensor, sizes: Sequence[int]) -> Tensor:
        if self.tp.world_size == 1:
            return functional.embedding(token_ids_T, self.weight)
        is_elsewhere_T = (token_ids_T < self.share.start) | (token_ids_T >= self.share.stop)
        rows_T = (token_ids_T - self.share.start).masked_fill(is_elsewhere_T, 0)
        hidden_TD = functional.embedding(rows_T, self.weight).masked_fill(is_elsewhere_T[:, None], 0.0)
        return self.tp.reduce_scatter(hidden_TD, sizes)  # collective: all tp ranks


class OutputHead(nn.Module):
    """Logits over the vocabulary. With tied embeddings, this head uses the embedding's weight."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        context: BuildContext,
        *,
        tied_to: Embedding | None,
        divisor: float = 1.0,
        cap: float | None = None,
        has_bias: bool = False,
    ) -> None:
        """
        Args:
            tied_to: the embedding whose weight is used.
            divisor: divides the logits.
            cap: limits the divided logits to ± this number by a hyperbolic tangent (soft-capping); None: no limit.
        """
        super().__init__()
        self.tp = context.tp
        self.divisor, self.cap = divisor, cap
        self.share_sizes = share_sizes(vocab_size, self.tp.world_size)
        self.share = share_of(vocab_size, self.tp.rank_in_group, self.tp.world_size)
        # The head picks the token: never quantise it below int8; fp8 is too coarse.
        self.weights = Weights(
            products.SINGLE,
            (1, self.share_sizes[self.tp.rank_in_group], hidden_size),
            context,
            has_bias=has_bias,
            limits=QuantizationLimits(min_bits=8, cuts=None),
            # Logits stay float32 if the kernels can return float32: in bfloat16, likely tokens often tie.
            chunks=InputChunks(hidden_size, keeps_float32=True),
            borrow=(lambda: tied_to.weight[None]) if tied_to else None,
        )

    @property
    def weight(self) -> Tensor:
        """This rank's rows [v, D] of the weight. Not available after packing."""
        return self.weights.open.weight_eOI[0]

    @property
    def bias(self) -> Tensor | None:
        """This rank's part [v] of the bias."""
        return None if self.weights.bias is None else self.weights.bias[0]

    def forward(self, hidden_LD: Tensor) -> Tensor:
        """Return logits [L, V] on every tp rank, with contiguous rows, which the sampler relies on."""
        logits_Lv = self.weights.product.multiply(hidden_LD)
        if self.divisor != 1.0:
            logits_Lv = logits_Lv / self.divisor
        if self.cap is not None:
            logits_Lv = (logits_Lv / self.cap).tanh() * self.cap
        if self.tp.world_size == 1:
            return logits_Lv
        num_rows = len(logits_Lv)
        sizes = [num_rows * share for share in self.share_sizes]
        # collective: all tp ranks
        parts = self.tp.all_gather(logits_Lv.flatten(), sizes).split(sizes)
        shares_LV = [part.view(num_rows, share) for part, share in zip(parts, self.share_sizes, strict=True)]
        return torch.cat(shares_LV, dim=1)
