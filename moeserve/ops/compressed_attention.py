"""Attention to a window of tokens and to compressed entries (DeepSeek-V4) as an operation: shapes, cache, protocol.

Tokens are divided into windows of `ratio` at fixed positions. A window becomes one entry: for each channel, the values
of its tokens weighted by the softmax of their gates. With overlap a token has two series of values and gates: one for
the entry of the next window, and one for that of its own. A token attends to the last `window` tokens and to the
entries of all windows that end at its position or before, or to those of them that an indexer chooses. Tokens and
entries are keys and values at once, shared by all heads.

The softmax of a window is computed token by token, and its running state, the *tail*, is kept for the last token of
each block. So a request can continue, or another one can begin, after any full block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeserve.ops.indexer import ChosenEntries
from moeserve.protocol import CacheKind
from moeserve.step_inputs import StepInputs

# T tokens, N query heads, H head size, I size of an indexer's key, m tokens of a window, B tokens of a block, E entries
# of a block, V vectors of a cache, X values and gates of a token


@dataclass(frozen=True, kw_only=True)
class CompressedShape:
    """One layer's part on one rank."""

    num_heads: int
    whole_num_heads: int  # of all tp ranks together, on which the order of sums depends
    head_size: int
    scale: float  # of the products of queries and keys
    window: int
    ratio: int | None  # tokens of a compressed window; None: there are no entries
    index_size: int | None  # of the keys of an indexer; None: all entries are attended to, and windows do not overlap

    @property
    def num_series(self) -> int:
        """Values and gates of a token: for the entry of the next window and of its own, or of its own alone."""
        return 1 if self.index_size is None else 2

    def entries_of_block(self, block_size: int) -> int:
        """Return the most windows that end in a block."""
        return 0 if self.ratio is None else -(-block_size // self.ratio)


@dataclass(frozen=True)
class CompressedCache:
    """The cache of one layer, in blocks: of tokens, which are needed within a window, and of entries and tails."""

    # [V, H]: those of tokens, block after block, and behind them those of entries; one memory, so that a row can attend
    # to both.
    vectors: Tensor
    tokens: Tensor  # [num_window_blocks, B, H], a view of it
    entries: Tensor  # [num_blocks, E, H], the other part
    # [num_blocks, series * 3 * H] float32: for the entry of the current window, then for that of the next one, after
    # the last token of the block: the largest gate, the sum of exponentials, and the weighted sum of values.
    tails: Tensor | None = None
    index_keys: Tensor | None = None  # [num_blocks, E, I]
    index_tails: Tensor | None = None  # [num_blocks, series * 3 * I] float32

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.tokens.shape[1]

    @property
    def kept_tensors(self) -> tuple[Tensor, ...]:
        """All that a block holds to the end of a request."""
        every = self.entries, self.tails, self.index_keys, self.index_tails
        return tuple(tensor for tensor in every if tensor is not None and tensor.numel() > 0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that a block holds; the first dimension is the block."""
        return self.tokens, *self.kept_tensors

    @property
    def tensors_of_items(self) -> dict[CacheKind, tuple[Tensor, ...]]:
        """The tensors by the kind of their items."""
        return {CacheKind.WINDOW_BLOCK: (self.tokens,), CacheKind.BLOCK: self.kept_tensors}

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
    ) -> CompressedCache:
        """Return uninitialised memory."""
        num_entries, size = shape.entries_of_block(block_size), shape.head_size

        def tail(size: int) -> Tensor:
            return torch.empty(num_blocks, shape.num_series * 3 * size, dtype=torch.float32, device=device)

        num_tokens = num_window_blocks * block_size
        vectors = torch.empty(num_tokens + num_blocks * num_entries, size, dtype=dtype, device=device)
        tokens = vectors[:num_tokens].view(num_window_blocks, block_size, size)
        entries = vectors[num_tokens:].view(num_blocks, num_entries, size)
        if shape.ratio is None:
            return cls(vectors, tokens, entries)
        if shape.index_size is None:
            return cls(vectors, tokens, entries, tail(size))
        keys = torch.empty(num_blocks, num_entries, shape.index_size, dtype=dtype, device=device)
        return cls(vectors, tokens, entries, tail(size), keys, tail(shape.index_size))


class CompressedAttention(Protocol):
    """The operations of one layer between its projections. Slots of -1 in `step.cache_slots` store nothing.

    In `windows`, the blocks of the same step are those of tokens.
    """

    def pool(self, projected_TX: Tensor, bias_mY: Tensor, tails: Tensor, block_size: int, step: StepInputs) -> Tensor:
        """Update tails, and return the pooled values of each window in the row of its last token.

        Drafts at the end of a chunk (`ChunkSpan.num_drafts`) have pooled values, but change no tail.

        Args:
            projected_TX: values of each series, then gates of each series; may be a view of a wider projection.
            bias_mY: float32, added to the gates of the i-th token of a window; Y = X / 2.

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
        """Store the vector of each token, and the entry and its key of each window, in the row of its last token."""
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
        """Return [T, N, H] in the dtype of the queries. Rows of no chunk get zeros.

        Args:
            chosen: slots of `CompressedCache.index_keys`, whose blocks have whole windows; None: all entries.
            sinks_N: float32, see `AttentionBackend`.
        """
        ...
