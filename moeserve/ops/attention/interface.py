"""Grouped-query attention of one layer: its shape, its cache and its operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moeserve.ops.rows.interface import Rotation
from moeserve.step_inputs import StepInputs


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One layer's part of grouped-query attention on one rank."""

    num_heads: int
    num_kv_heads: int
    head_size: int  # size of a query and of a key
    dtype: torch.dtype
    scale: float  # factor of the products of queries and keys
    # Number of query heads of all tp ranks that read one key-value head. The order of sums depends on this number.
    whole_group_size: int | None = None  # None: N / G
    value_size: int | None = None  # at most head_size; None: head_size
    # Maximum number of positions that a token attends to, including its own; None: all positions up to its own. If
    # negative, positions are divided into chunks of -window, and a token attends only to positions in its own chunk.
    window: int | None = None
    has_sinks: bool = False


@dataclass(frozen=True)
class KeyValueCache:
    """Paged keys [num_blocks, G, block_size, H] and values [num_blocks, G, block_size, V] of one layer.

    Both have the model's dtype, or are uint8 codes with a scale for each token and head; see `float8_rows.py`.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None  # [num_blocks, G, block_size] bfloat16
    value_scales: Tensor | None = None
    # [rows, W - 1, channels]: the last inputs of a convolution of keys and values, see `StateRows`; None: there is none
    inputs: Tensor | None = None
    group: int = field(default=0, kw_only=True)  # index of the cache group that the blocks belong to

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that consist of blocks. The first dimension is the block, the second the head."""
        if self.key_scales is None or self.value_scales is None:
            return self.keys, self.values
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def tensors_of_items(self) -> tuple[tuple[Tensor, ...], ...]:
        """The tensors of each of the layer's `cache_items`."""
        return (self.tensors,) if self.inputs is None else (self.tensors, (self.inputs,))

    def clear(self) -> None:
        for tensors in self.tensors_of_items:
            for tensor in tensors:
                tensor.zero_()


class AttentionBackend(Protocol):
    """Grouped-query attention of one layer. Query head n reads key-value head n // (N // G)."""

    def rotate_and_write(
        self,
        query_TNH: Tensor,
        key_TGH: Tensor,
        value_TGV: Tensor,
        rotation: Rotation,
        cache: KeyValueCache,
        step: StepInputs,
    ) -> Tensor:
        """Store each token's rotated key and value at `step.cache_slots`, and return the rotated queries.

        A token with slot -1 is not stored. Queries and keys may be overwritten.
        """
        ...

    def attend(
        self,
        query_TNH: Tensor,
        cache: KeyValueCache,
        step: StepInputs,
        sinks_N: Tensor | None = None,
        biases_TNE: Tensor | None = None,
    ) -> Tensor:
        """Attend from row i of a chunk, at position p = context_len - num_rows + i, to the positions up to p.

        With a window, rows attend only to positions after p - window. Rows outside all chunks, or before position 0,
        get zeros.

        Args:
            sinks_N: float32, an additional score for each query head, without a value (gpt-oss, arXiv 2508.10925): each
                row is scaled by sum(exp(scores)) / (sum(exp(scores)) + exp(sink)). [T, N] has a score for each token
                and head (Inkling 2), not on GPUs.
            biases_TNE: in the dtype of the queries. Bias d of a token is added to the score of the position at distance
                d before the token, where 0 is the token itself (Inkling). Distances of E or more get no bias.

        Returns:
            [T, N, V] in the dtype of the queries.
        """
        ...
