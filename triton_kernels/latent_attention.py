"""Attention over a paged cache of latent vectors, which all heads share: their keys, and in their beginning the values.

Owns how the kernels of `paged_kernels` are sized for it. Knows no weights: what leads from latent vectors to the
heads' keys and values is in the queries, and in what is made of the results (DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

import triton
from torch import Tensor

from moeserve.triton_kernels.paged_kernels import AttentionConfig, Splits, launch_attention, launch_write

# T tokens, N query heads, L latent size, P latent size and rotary size, S chunks


def write_latents(latent_TP: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Stores each token's vector at its slot, block * block_size + offset; a slot of -1 keeps nothing.

    Memory moved: 2 * T * P * element size, and the slots.

    Args:
        latent_TP: [T, P]; may be strided.
        cache: [num_blocks, block_size, P] in the same dtype.
        slots_T: [T] int64.
    """
    launch_write(latent_TP[:, None], None, cache[:, None], None, slots_T)


def latent_attention(
    query_TNP: Tensor,
    cache: Tensor,
    block_table: Tensor,
    row_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    latent_size: int,
    max_rows_per_chunk: int,
    max_context: int,
    max_rows: int | None = None,
) -> Tensor:
    """Row i of a chunk is at position context_len - num_rows + i and attends to the positions up to it.

    Scores, their softmax and all sums are float32; weights are rounded to the dtype of the vectors before they multiply
    them. A row's bytes depend on its chunk, not on the other chunks of the step.

    Memory moved: per chunk of one row, P * element size for each position and 64 heads, which is what bounds the time
    up to some 32 heads; and 4 * L + 8 bytes, written and read, for each head and split. Operations: 2 * N * (P + L) for
    each row and position it attends to, which is what bounds the time otherwise.

    Args:
        query_TNP: [T, N, P] float32, bfloat16 or float16; may be strided.
        cache: [num_blocks, block_size, P] in the same dtype; any block_size.
        block_table: [S, max_blocks] int32; nothing is read of it beyond a chunk's context.
        row_starts: [S + 1] int32, from 0: chunk s has rows row_starts[s] to row_starts[s + 1] - 1; there may be none.
        context_lens: [S] int32.
        scale: what the products of queries and vectors are multiplied with.
        latent_size: L, how many of a vector's P elements are its value.
        max_rows_per_chunk: no chunk has more rows. With 1, only the kernels for chunks of one row are launched.
        max_context: no context is longer, such as max_blocks * block_size.
        max_rows: chunks of more rows get zeros; None: there are none such.

    Returns:
        [T, N, L], contiguous, in the dtype of the queries; zeros in rows of no chunk, and in those before position 0.
    """
    num_heads, vector_size = query_TNP.shape[1:]
    assert cache.shape[2] == vector_size >= latent_size
    element_size = query_TNP.element_size()
    return launch_attention(
        query_TNP,
        cache[:, None],
        None,
        block_table,
        row_starts,
        context_lens,
        scale=scale,
        window=None,
        sinks_N=None,
        value_size=latent_size,
        max_rows_per_chunk=max_rows_per_chunk,
        max_context=max_context,
        max_attended_rows=max_rows_per_chunk if max_rows is None else max_rows,
        tile_config=tile_config(latent_size, element_size),
        split_config=split_config(num_heads, latent_size, element_size),
        splits=choose_splits(num_heads),
    )


def tile_config(latent_size: int, element_size: int) -> AttentionConfig:
    """For chunks of many rows: 64 pairs of row and head, whose sums of 512 elements fill half of 8 warps' registers."""
    if element_size == 4:  # on plain float32 units: only as large as their registers and shared memory allow
        return AttentionConfig(block_pairs=16, block_positions=16, num_warps=8, num_stages=1)
    return AttentionConfig(block_pairs=64, block_positions=32, num_warps=8, num_stages=3)


def split_config(num_heads: int, latent_size: int, element_size: int) -> AttentionConfig:
    """For chunks of one row: fewer pairs where there are few heads."""
    block_pairs = min(max(triton.next_power_of_2(num_heads), 16), 64)
    if element_size == 4 or block_pairs == 64:
        return tile_config(latent_size, element_size)
    return AttentionConfig(block_pairs, block_positions=32, num_warps=8, num_stages=4 if block_pairs == 16 else 3)


def choose_splits(num_heads: int) -> Splits:
    """Fewer for many heads, whose partial sums take much memory."""
    return Splits(piece_size=128, max_splits=min(max(1024 // triton.next_power_of_2(num_heads), 8), 32))
