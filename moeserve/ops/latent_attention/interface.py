"""Latent attention of one layer, as operations."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from moeserve.ops.indexer.interface import ChosenEntries
from moeserve.step_inputs import StepInputs

# n some heads, C positions, L latent size, P elements of a latent vector, K and E parts of a key


class LatentShape(NamedTuple):
    """The shape of one layer's latent attention."""

    scale: float  # factor of the products of queries and keys
    latent_size: int  # L
    whole_num_heads: int  # query heads of all tp ranks; the order of sums depends on it
    window: int | None = None  # maximum number of positions that a row attends to; None: no limit


class ExpandLatents(Protocol):
    """Compute the keys [n, C, K] and values [n, C, V] of n heads from latent vectors [C, L]. Results are contiguous."""

    def __call__(self, latent_CL: Tensor, heads: slice = ..., /) -> tuple[Tensor, Tensor]: ...


class LatentAttentionBackend(Protocol):
    """Multi-head latent attention (arXiv 2405.04434) of one layer, with absorbed key and value projections.

    All heads read one vector [P] per position. The vector is the key, and its first L elements are the value. The cache
    [num_blocks, block_size, P] has the dtype of vectors and queries.
    """

    @property
    def takes_all_rows(self) -> bool:
        """True if this backend must also run long chunks, to stay batch-invariant.

        Otherwise it is faster to expand the keys and values of chunks with many rows, and to attend to these.
        """
        ...

    def write(self, latent_TP: Tensor, cache: Tensor, step: StepInputs) -> None:
        """Store each token's vector at `step.cache_slots`. A token with slot -1 is not stored."""
        ...

    def attend(
        self,
        query_TNP: Tensor,
        cache: Tensor,
        step: StepInputs,
        max_rows: int | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attend from row i of a chunk, at position p = context_len - num_rows + i, to the positions up to p.

        Args:
            max_rows: chunks with more rows get zeros. Must be None if `takes_all_rows`.
            sinks_N: float32, an additional score for each query head, without a value; or None.

        Returns:
            [T, N, L] in the dtype of the queries: the values weighted by the softmax of the scaled scores. Rows outside
            all chunks, or before position 0, get zeros.
        """
        ...

    def attend_chosen(
        self, query_TNP: Tensor, cache: Tensor, chosen: ChosenEntries, sinks_N: Tensor | None = None
    ) -> Tensor:
        """Attend from each row to the vectors in the row's chosen slots.

        Returns:
            [T, N, L] in the dtype of the queries; zeros for rows without entries. If `takes_all_rows`, a row that
            attends to all positions up to its own has the same bytes as with `attend`.
        """
        ...

    def attend_expanded(
        self,
        query_TNK: Tensor,
        query_TNE: Tensor,
        cache: Tensor,
        step: StepInputs,
        max_rows: int,
        expand: ExpandLatents,
        out_TNV: Tensor,
    ) -> None:
        """Attend from the chunks with more than `max_rows` rows, with keys and values expanded for each head.

        A head's key is its own part [K] followed by the last E elements of the vector, which all heads share. Must not
        be called if `takes_all_rows`.

        Args:
            query_TNK, query_TNE: the parts of the queries for the two parts of the keys.
            max_rows: only rows with a position, that is, within the context, are counted.
            expand: computes keys and values from latent vectors.
            out_TNV: contiguous, in the dtype of the queries; only rows of these chunks that have a position are
                written.
        """
        ...
