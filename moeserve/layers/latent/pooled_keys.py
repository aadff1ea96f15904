"""Keys of an indexer that stand for several tokens each (GLM-5.3)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moeserve.layers.build_context import BuildContext
from moeserve.layers.rows import At, Row, whole
from moeserve.ops import compressed_attention
from moeserve.ops.compressed_attention.interface import CompressedShape
from moeserve.step_inputs import StepInputs

# m tokens of a key, I size of a key


class PooledKeys(nn.Module):
    """Pools the keys of each window of tokens to their mean, weighted for each channel by the softmax of gates."""

    def __init__(self, key_dim: int, num_tokens: int, context: BuildContext) -> None:
        """
        Args:
            num_tokens: tokens of a window.
        """
        super().__init__()
        self.bias = context.parameter(num_tokens, key_dim, dtype=torch.float32)  # added to gates
        shape = CompressedShape(
            num_heads=1, whole_num_heads=1, head_size=key_dim, scale=1.0, window=1, ratio=num_tokens, index_size=None
        )
        self._backend = compressed_attention.make(context.backend, shape)

    def write(self, projected_TX: Tensor, key_cache: Tensor, tails: Tensor, block_size: int, step: StepInputs) -> None:
        """Add the tokens of a step to the pooled keys.

        Args:
            projected_TX: keys, then gates; X = 2 * I.
            key_cache: [num_blocks, block_size / m, I]
            tails: [num_blocks, 3 * I] float32, the state of the window that a block's last token is in.
        """
        pooled_TI = self._backend.pool(projected_TX, self.bias, tails, block_size, step)
        self._backend.write_entries(block_size, step, (pooled_TI, key_cache))

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module, whose weights are whole on every rank."""
        yield at("index_kpool_compress_ape"), whole(self.bias)
