"""Attention to a window of tokens and to compressed entries (DeepSeek-V4) as an operation: shapes, cache, protocol.

Tokens are divided into windows of `ratio` tokens at fixed positions. A window is compressed to one entry: for each
channel, the sum of its tokens' values weighted by the softmax of their gates. If windows overlap, a token has two
series of values and gates: one for the entry of the next window, and one for the entry of its own window. A token
attends to the last `window` tokens, and to the entries of all windows that end at or before its position, or only to
the entries that an indexer chooses among these. The vectors of tokens and entries are both keys and values, shared by
all heads.

The softmax of a window is computed token by token. The running state of a window, the *tail*, is kept for the last
token of each block, so that a request can continue, and another request can reuse the prefix, after any full block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moeserve.ops.indexer.interface import ChosenEntries
from moeserve.step_inputs import StepInputs

# I size of an indexer's key, m tokens of a window, B tokens of a block, E entries of a block, V vectors of a cache,
# X values and gates of a token


@dataclass(frozen=True, kw_only=True)
class CompressedShape:
    """One layer's part of compressed attention on one rank."""

    num_heads: int
    whole_num_heads: int  # heads of all tp ranks together; the order of sums depends on it
    head_size: int
    scale: float  # factor of the products of queries and keys
    window: int
    ratio: int | None  # tokens of a compressed window; None: there are no entries
    index_size: int | None  # key size of the indexer; None: tokens attend to all entries, and windows do not overlap

    @property
    def num_series(self) -> int:
        """Number of series of values and gates of a token: two if windows overlap, otherwise one."""
        return 1 if self.index_size is None else 2

    def entries_of_block(self, block_size: int) -> int:
        """Return the maximum number of windows that end in a block."""
        return 0 if self.ratio is None else -(-block_size // self.ratio)


@dataclass(frozen=True)
class CompressedCache:
    """The paged cache of one layer: vectors of tokens, which are needed only within a window, and entries and tails."""

    # [V, H]: the vectors of tokens, block after block, followed by the vectors of entries. Both share one tensor, so
    # that one list of indices can name both.
    vectors: Tensor
    tokens: Tensor  # [num_window_blocks, B, H], a view of the first part of `vectors`
    entries: Tensor  # [num_blocks, E, H], a view of the second part of `vectors`
    # [num_blocks, series * 3 * H] float32: the tails after the last token of the block, first for the entry of the
    # current window, then for the next entry. Each tail has the largest gate, the sum of exponentials, and the weighted
    # sum of values.
    tails: Tensor | None = None
    index_keys: Tensor | None = None  # [num_blocks, E, I]
    index_tails: Tensor | None = None  # [num_blocks, series * 3 * I] float32
    group: int = field(default=0, kw_only=True)  # index of the group that the blocks of tokens belong to

    @property
    def block_size(self) -> int:
        """Number of tokens in a block."""
        return self.tokens.shape[1]

    @property
    def kept_tensors(self) -> tuple[Tensor, ...]:
        """The tensors whose blocks are needed until the end of a request."""
        every = self.entries, self.tails, self.index_keys, self.index_tails
        return tuple(tensor for tensor in every if tensor is not None and tensor.numel() > 0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the cache, whose first dimension is the block."""
        return self.tokens, *self.kept_tensors

    @property
    def tensors_of_items(self) -> tuple[tuple[Tensor, ...], ...]:
        """The tensors of each of the layer's `cache_items`."""
        return (self.tokens,), self.kept_tensors

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()

    @classmethod
    def empty(
        cls,
        shape: CompressedShape,
        *,
        num_blocks: int,
        num_window_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        group: int = 0,
    ) -> CompressedCache:
        """Return a cache with uninitialised memory."""
        num_entries, size = shape.entries_of_block(block_size), shape.head_size

        def tail(size: int) -> Tensor:
            return torch.empty(num_blocks, shape.num_series * 3 * size, dtype=torch.float32, device=device)

        num_tokens = num_window_blocks * block_size
        vectors = torch.empty(num_tokens + num_blocks * num_entries, size, dtype=dtype, device=device)
        tokens = vectors[:num_tokens].view(num_window_blocks, block_size, size)
        entries = vectors[num_tokens:].view(num_blocks, num_entries, size)
        if shape.ratio is None:
            return cls(vectors, tokens, entries, group=group)
        if shape.index_size is None:
            return cls(vectors, tokens, entries, tail(size), group=group)
        keys = torch.empty(num_blocks, num_entries, shape.index_size, dtype=dtype, device=device)
        return cls(vectors, tokens, entries, tail(size), keys, tail(shape.index_size), group=group)


class CompressedAttention(Protocol):
    """The operations of one layer between its projections. Tokens with slot -1 in `step.cache_slots` are not stored.

    `windows` is the same step with the block table and slots of `CompressedCache.tokens`.
    """

    def pool(self, projected_TX: Tensor, bias_mY: Tensor, tails: Tensor, block_size: int, step: StepInputs) -> Tensor:
        """Update the tails, and return the pooled values of each window in the row of its last token.

        Drafts at the end of a chunk (`ChunkSpan.num_drafts`) get pooled values, but do not change the tails.

        Args:
            projected_TX: values of each series, then gates of each series; may be a view of a wider projection.
            bias_mY: float32; row i is added to the gates of the i-th token of a window; Y = X / 2.

        Returns:
            [T, Y / series] in the dtype of the projection; rows of other tokens have arbitrary finite values.
        """
        ...

    def write(
        self,
        vector_TH: Tensor,
        entry_TH: Tensor | None,
        index_key_TI: Tensor | None,
        cache: CompressedCache,
        step: StepInputs,
        windows: StepInputs,
    ) -> None:
        """Store the vector of each token, and the entry and index key of each window; see `write_entries`."""
        ...

    def write_entries(self, block_size: int, step: StepInputs, *entries: tuple[Tensor, Tensor]) -> None:
        """Store entries of one or more kinds.

        Args:
            block_size: tokens of a block.
            entries: rows [T, H], in which the entry of a window is in the row of its last token, and other rows are
                ignored; and the memory of the entries [num_blocks, E, H].
        """
        ...

    def attend(
        self,
        query_TNH: Tensor,
        chosen: ChosenEntries | None,
        sinks_N: Tensor,
        cache: CompressedCache,
        step: StepInputs,
        windows: StepInputs,
    ) -> Tensor:
        """Return the attended values [T, N, H] in the dtype of the queries. Rows outside all chunks get zeros.

        Args:
            chosen: slots in `CompressedCache.index_keys` of the entries to attend to, whose blocks must hold whole
                windows; None: all entries.
            sinks_N: float32, see `AttentionBackend.attend`.
        """
        ...
