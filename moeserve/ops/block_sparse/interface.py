"""Block-sparse attention (MiniMax-M3): each token attends to some blocks of its context, which an indexer chooses.

A cache holds a small key for each position of a context. A token has a query q_h for each head h of the indexer. The
score of a block for h is

    max over k of q_h . k

where k are the keys of the block's positions up to the token. The attention heads that belong to h attend to the
`top_k` blocks with the highest scores. The last `num_local` blocks, up to the token's own block, are always chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moeserve.ops.attention.interface import AttentionShape, KeyValueCache
from moeserve.step_inputs import StepInputs

# n heads of the indexer, I size of its keys


@dataclass(frozen=True, kw_only=True)
class BlockSparseShape:
    """One layer's part of block-sparse attention on one rank.

    Query head i reads the blocks that the indexer's head i // (N / n) chooses. Either n divides G, or G divides n.
    """

    attention: AttentionShape
    num_index_heads: int  # number of the indexer's heads (n)
    block_size: int  # positions in a block
    top_k: int  # number of blocks that a token attends to
    num_local: int  # number of blocks, up to the token's own, that are always chosen; at most top_k

    @property
    def num_pairs(self) -> int:
        """Number of pairs of an indexer's head and a key-value head that share query heads."""
        return max(self.num_index_heads, self.attention.num_kv_heads)


class BlockSparseAttention(Protocol):
    """Block-sparse attention of one layer."""

    def write(self, key_TI: Tensor, index_keys: Tensor, step: StepInputs) -> None:
        """Store the indexer's key of each token at `step.cache_slots`. A token with slot -1 is not stored.

        Args:
            index_keys: [num_blocks, block_size, I]
        """
        ...

    def attend(
        self, query_TNH: Tensor, index_query_TnI: Tensor, cache: KeyValueCache, index_keys: Tensor, step: StepInputs
    ) -> Tensor:
        """Return the results [T, N, V] of `AttentionBackend.attend` over the chosen blocks only.

        The caches must already hold the tokens of the step. Scores are float32. Ties go to the lowest position.

        Args:
            query_TNH: contiguous.
            index_query_TnI: may be a view of a projection.
        """
        ...
