"""The short convolution of keys and values over the last tokens, whose input is added to its output (Inkling)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeserve.kv.layer_cache import CacheDivision, CacheItems, Places
from moeserve.kv.rules import KeepState
from moeserve.layers.build_context import BuildContext
from moeserve.layers.linear import SideBySide
from moeserve.layers.rows import At, Destination, Row, residual_taps, rows_of_heads
from moeserve.ops import convolution
from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights
from moeserve.ops.rows.interface import Rows
from moeserve.step_inputs import StepInputs


@dataclass(frozen=True, kw_only=True)
class TapsSpec:
    """The shape of the convolution."""

    num_taps: int  # tokens that the convolution spans, the current one included
    factor: float | None = None  # multiplies the results of the convolution
    has_token_taps: bool = False  # each token adds numbers of its own to the taps of each head (Inkling 2)


class KeyValueConvolution(nn.Module):
    """Convolves the keys and values of a rank's heads, which lie side by side."""

    def __init__(
        self,
        config: TapsSpec,
        kv_heads: slice,
        num_kv_heads: int,
        sizes: tuple[int, int],
        hidden_size: int,
        context: BuildContext,
    ) -> None:
        """
        Args:
            kv_heads: the key-value heads of this rank.
            num_kv_heads: number of key-value heads of all ranks.
            sizes: the sizes of a key and of a value, which must be equal with `has_token_taps`.
        """
        super().__init__()
        self.context, self.sizes, self.kv_heads, self.num_kv_heads = context, sizes, kv_heads, num_kv_heads
        self.shares = [rows_of_heads(kv_heads, size) for size in sizes]
        self.widths = [share.stop - share.start for share in self.shares]
        self.taps = context.parameter(config.num_taps, sum(self.widths), dtype=torch.float32)
        self.scale_1 = None if config.factor is None else torch.full((1,), config.factor, device=context.device)
        self.token_taps: SideBySide | None = None
        if config.has_token_taps:
            num_numbers = (kv_heads.stop - kv_heads.start) * config.num_taps
            self.token_taps = SideBySide(hidden_size, [num_numbers] * 2, context)
        shape = ConvolutionShape(
            num_channels=sum(self.widths), num_taps=config.num_taps, is_gated=False, is_linear=True
        )
        self._convolve = convolution.make(context.backend, shape)

    @property
    def items(self) -> CacheItems:
        """The cache items of the convolution's last inputs. A rank has the channels of its own keys and values."""
        keys, values = self.shares
        first = self.num_kv_heads * self.sizes[0]
        channels = range(keys.start, keys.stop), range(first + values.start, first + values.stop)
        rule = KeepState.of_blocks(self.context.block_size)
        num_bytes = (len(self.taps) - 1) * self.taps.shape[1] * self.context.dtype.itemsize
        return CacheItems(rule, num_bytes, (CacheDivision(2, channels),))

    def make_inputs(self, places: Places) -> Tensor:
        """Return memory for the last inputs of each request, [rows, num_taps - 1, channels]."""
        shape = places.num_rows, len(self.taps) - 1, self.taps.shape[1]
        return torch.empty(shape, dtype=self.context.dtype, device=self.context.device)

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module."""
        parts = zip(("k_sconv", "v_sconv"), self.taps.split(self.widths, dim=1), self.shares, self.sizes, strict=True)
        for name, taps, share, size in parts:
            num_channels = self.num_kv_heads * size
            if self.token_taps is None:
                yield from residual_taps(at(f"{name}.conv1d.weight"), taps, share, num_channels)
                continue
            for lag, taps_1C in enumerate(reversed(taps.split(1))):
                place = slice(lag, lag + 1), share
                offset = 0.0 if lag else 1.0  # the input is added to the output
                yield at(f"{name}.static_weight"), Destination(taps_1C, (len(taps), num_channels), place, offset=offset)
        if self.token_taps is not None:
            share, num_rows = rows_of_heads(self.kv_heads, len(self.taps)), self.num_kv_heads * len(self.taps)
            names = (f"{name}.weight_proj" for name in ("k_sconv", "v_sconv"))
            yield from self.token_taps.rows(at, *((name, share, num_rows) for name in names))

    def forward(
        self, key_value_TX: Tensor, inputs: Tensor, step: StepInputs, rows: Rows | tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return the convolved keys and values, [T, channels] each. `rows` are the inputs of the layer."""
        token_taps_TGW = None
        if self.token_taps is not None:
            token_taps_TGW = self.token_taps(rows[1:] if isinstance(rows, tuple) else (rows, rows))
            token_taps_TGW = token_taps_TGW.unflatten(1, (-1, len(self.taps)))
        weights = ConvolutionWeights(self.taps, None, self.scale_1)
        mixed_TX = self._convolve(key_value_TX, weights, inputs, step, token_taps_TGW)
        key_TX, value_TX = mixed_TX.split(self.widths, dim=1)
        return key_TX, value_TX
