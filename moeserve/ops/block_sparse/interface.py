"""Block-sparse attention (MiniMax-M3): each token attends to some blocks of its context, which an indexer chooses.

A cache holds a small key for each position of a context. A token has a query q_h for each head h of the indexer. The
score of a block of positions is, over the keys k of those that the token sees,

    max of q_h . k

and the attention heads of h attend to the `top_k` blocks with the highest scores. The last `num_local` blocks up to
that of the token are among them.
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

    Query head i has the choice of the indexer's head i // (N / n). One of n and G divides the other.
    """

    attention: AttentionShape
    num_index_heads: int  # n
    block_size: int  # positions in a block
    top_k: int
    num_local: int  # at most top_k

    @property
    def num_pairs(self) -> int:
        """Pairs of an indexer's head and a key-value head that some query heads read."""
        return max(self.num_index_heads, self.attention.num_kv_heads)


class BlockSparseAttention(Protocol):
    """Block-sparse attention of one layer."""

    def write(self, key_TI: Tensor, index_keys: Tensor, step: StepInputs) -> None:
        """Store the indexer's key of each token at `step.cache_slots`, unless that is -1.

        Args:
            index_keys: [num_blocks, block_size, I]
        """
        ...

    def attend(
        self, query_TNH: Tensor, index_query_TnI: Tensor, cache: KeyValueCache, index_keys: Tensor, step: StepInputs
    ) -> Tensor:
        """Return [T, N, V]: `AttentionBackend.attend` with the chosen blocks alone, which all caches already hold.

        Scores are float32. Ties go to the lowest position.

        Args:
            query_TNH: contiguous.
            index_query_TnI: may be a view of a projection.
        """
        ...
