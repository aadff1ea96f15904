"""Limits of the Euclidean lengths of heads (Inkling 2): longer heads are scaled down."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moeserve.layers.build_context import BuildContext
from moeserve.layers.rows import At, Row, some_rows
from moeserve.ops import mixing


class LengthLimit(nn.Module):
    """Scales heads that are longer than `limit` down to this length, perhaps after a learned scale of each element."""

    def __init__(
        self, limit: float, heads: slice, num_heads: int, size: int, context: BuildContext, *, has_scale: bool = True
    ) -> None:
        """
        Args:
            heads: the heads of this rank.
            num_heads: number of heads of all ranks.
        """
        super().__init__()
        self.limit, self.heads, self.num_heads = limit, heads, num_heads
        shape = heads.stop - heads.start, size
        self.scale = context.parameter(*shape, dtype=torch.float32) if has_scale else None
        self._limit_lengths = mixing.make(context.backend).limit_lengths

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of the scale, if there is one."""
        if self.scale is not None:
            yield at("scale"), some_rows(self.scale, self.heads, self.num_heads)

    def forward(self, heads_TNH: Tensor) -> Tensor:
        return self._limit_lengths(heads_TNH, self.limit, self.scale)
