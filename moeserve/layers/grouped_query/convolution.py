"""The short convolution of keys and values (Inkling): each is added to a convolution over the tokens before it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moeserve.kv.layer_cache import CacheDivision, CacheItems, Places
from moeserve.kv.rules import KeepState
from moeserve.layers.context import ModelContext
from moeserve.layers.rows import At, Row, residual_taps, rows_of_heads
from moeserve.ops import convolution
from moeserve.ops.convolution.interface import ConvolutionShape, ConvolutionWeights
from moeserve.step_inputs import StepInputs


class KeyValueConvolution(nn.Module):
    """Convolves the keys and values of a rank's heads, which lie side by side."""

    def __init__(
        self, num_taps: int, kv_heads: slice, num_kv_heads: int, sizes: tuple[int, int], context: ModelContext
    ) -> None:
        """
        Args:
            kv_heads: those of this rank.
            num_kv_heads: of all ranks together.
            sizes: of a key and of a value.
        """
        super().__init__()
        self.context, self.sizes, self.num_kv_heads = context, sizes, num_kv_heads
        self.shares = [rows_of_heads(kv_heads, size) for size in sizes]
        self.widths = [share.stop - share.start for share in self.shares]
        self.taps = context.parameter(num_taps, sum(self.widths), dtype=torch.float32)
        shape = ConvolutionShape(num_channels=sum(self.widths), num_taps=num_taps, is_gated=False, is_linear=True)
        self._convolve = convolution.make(context.backend, shape)

    @property
    def items(self) -> CacheItems:
        """The last inputs of each request. A rank has some channels of keys, and some of values."""
        keys, values = self.shares
        first = self.num_kv_heads * self.sizes[0]
        channels = range(keys.start, keys.stop), range(first + values.start, first + values.stop)
        rule = KeepState.of_blocks(self.context.block_size)
        num_bytes = (len(self.taps) - 1) * self.taps.shape[1] * self.context.dtype.itemsize
        return CacheItems(rule, num_bytes, (CacheDivision(2, channels),))

    def make_inputs(self, places: Places) -> Tensor:
        """Return the memory of the last inputs."""
        shape = places.num_rows, len(self.taps) - 1, self.taps.shape[1]
        return torch.empty(shape, dtype=self.context.dtype, device=self.context.device)

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the rows of its weights."""
        parts = zip(("k_sconv", "v_sconv"), self.taps.split(self.widths, dim=1), self.shares, self.sizes, strict=True)
        for name, taps, share, size in parts:
            yield from residual_taps(at(f"{name}.conv1d.weight"), taps, share, self.num_kv_heads * size)

    def forward(self, key_value_TX: Tensor, inputs: Tensor, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Return keys and values."""
        mixed_TX = self._convolve(key_value_TX, ConvolutionWeights(self.taps, None), inputs, step)
        key_TX, value_TX = mixed_TX.split(self.widths, dim=1)
        return key_TX, value_TX
