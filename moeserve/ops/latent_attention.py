"""Attention over a paged cache of latent vectors as one operation: writing, attending, and gathering for expansion.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with the weights absorbed: what leads from a latent vector
to a head's key is in the queries already, and what leads to its value comes after. All heads then read the same vector
per position. Knows no weights and no rotary embedding.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from moeserve.memory import new_empty
from moeserve.ops import backend
from moeserve.ops.attention import NATIVE_DTYPES
from moeserve.ops.dense_attention import attend_in_float32
from moeserve.ops.native import require_native
from moeserve.step_inputs import StepInputs

# T tokens, N query heads, L latent size, P latent size and rotary size; R rows of one chunk, C positions of its
# context, B blocks, Q queries of one chunk: rows times heads

logger = logging.getLogger(__name__)


class LatentAttentionBackend(Protocol):
    """Attention of one layer in which all heads share one vector per position: the key, and in its beginning the value.

    The cache is [num_blocks, block_size, P], in the dtype of vectors and queries.
    """

    @property
    def takes_all_rows(self) -> bool:
        """Whether long chunks belong here too, for a row's bytes must not depend on its chunk.

        If not, it is faster to expand the keys and values of chunks with many rows, and to attend to these.
        """
        ...

    def write(self, latent_TP: Tensor, cache: Tensor, step: StepInputs) -> None:
        """Stores each token's vector at `step.cache_slots`; a slot of -1 keeps nothing."""
        ...

    def attend(self, query_TNP: Tensor, cache: Tensor, step: StepInputs, max_rows: int | None = None) -> Tensor:
        """Row i of a chunk is at position context_len - num_rows + i and attends to the positions up to it.

        Args:
            max_rows: chunks of more rows get zeros. None if it `takes_all_rows`.

        Returns:
            [T, N, L] in the dtype of the queries: the sum of the vectors' first L elements, weighted with the softmax
            of the scaled products of query and vectors. Rows of no chunk, or before position 0, get zeros.
        """
        ...

    def gather(self, cache: Tensor, block_ids: Tensor, context_len: int) -> Tensor:
        """The vectors of one chunk's positions 0 to C - 1 = context_len - 1.

        Args:
            block_ids: the chunk's row of `step.block_table`.

        Returns:
            [C, P]
        """
        ...


def choose_latent_attention(device: str, *, scale: float, latent_size: int) -> LatentAttentionBackend:
    """The latent attention backend for a device type.

    Args:
        scale: what the products of queries and vectors are multiplied with.
        latent_size: L, how many of a vector's P elements are its value.
    """
    reference = TorchLatentAttention(scale=scale, latent_size=latent_size)
    match backend.of(device):
        case "native":
            return CpuLatentAttention(require_native(), reference)
        case "triton":
            from moeserve.ops.gpu import GpuLatentAttention

            return GpuLatentAttention(reference)
        case "torch":
            if device != "meta":
                logger.info(
                    "the kernels for device %s are not built or installed: attention runs in plain torch, slower",
                    device,
                )
            return reference


class TorchLatentAttention:
    """The reference, on any device: gathers each chunk's vectors and multiplies in float32."""

    takes_all_rows = False

    def __init__(self, *, scale: float, latent_size: int) -> None:
        self.scale = scale
        self.latent_size = latent_size

    def write(self, latent_TP: Tensor, cache: Tensor, step: StepInputs) -> None:
        kept = step.cache_slots >= 0
        cache.flatten(0, 1)[step.cache_slots[kept]] = latent_TP[kept]

    def attend(self, query_TNP: Tensor, cache: Tensor, step: StepInputs, max_rows: int | None = None) -> Tensor:
        num_heads = query_TNP.shape[1]
        out_TNL = query_TNP.new_zeros(*query_TNP.shape[:2], self.latent_size)
        for span, block_ids_B in zip(step.spans, step.block_table, strict=True):
            num_rows = min(span.num_rows, span.context_len)
            if num_rows == 0 or (max_rows is not None and num_rows > max_rows):
                continue
            last_row = span.first_row + span.num_rows
            rows = slice(last_row - num_rows, last_row)
            position_R = torch.arange(span.context_len - num_rows, span.context_len, device=query_TNP.device)
            latent_CP = self.gather(cache, block_ids_B, span.context_len)
            attended_QL = attend_in_float32(
                query_TNP[rows].flatten(0, 1),
                latent_CP,
                latent_CP[:, : self.latent_size],
                position_R.repeat_interleave(num_heads),
                scale=self.scale,
                window=None,
            )
            out_TNL[rows] = attended_QL.unflatten(0, (num_rows, num_heads)).to(query_TNP.dtype)
        return out_TNL

    def gather(self, cache: Tensor, block_ids: Tensor, context_len: int) -> Tensor:
        num_blocks = -(-context_len // cache.shape[1])
        return cache[block_ids[:num_blocks]].flatten(0, 1)[:context_len]


class CpuLatentAttention:
    """C++ kernels for writing and attending: the vectors are the keys of a single head, and its values too.

    A row's result has the same bytes whatever the chunk, the batch, the threads and the block size. Other dtypes than
    `NATIVE_DTYPES` go to the reference.
    """

    takes_all_rows = True

    def __init__(self, kernels: ModuleType, reference: TorchLatentAttention) -> None:
        self.kernels = kernels
        self.reference = reference

    def write(self, latent_TP: Tensor, cache: Tensor, step: StepInputs) -> None:
        self.kernels.write_cache(latent_TP[:, None], None, cache[:, None], None, step.cache_slots)

    def attend(self, query_TNP: Tensor, cache: Tensor, step: StepInputs, max_rows: int | None = None) -> Tensor:
        assert max_rows is None, "long chunks are attended to like all others"
        if query_TNP.dtype not in NATIVE_DTYPES:
            return self.reference.attend(query_TNP, cache, step)
        latent_size = self.reference.latent_size
        out_TNL = new_empty(query_TNP, *query_TNP.shape[:2], latent_size)
        vectors = cache[:, None]
        tensors = (query_TNP, vectors, vectors, step.block_table, step.row_starts, step.context_lens, out_TNL)
        self.kernels.paged_attention(*tensors, scale=self.reference.scale, window=None, value_size=latent_size)
        return out_TNL

    def gather(self, cache: Tensor, block_ids: Tensor, context_len: int) -> Tensor:
        return self.reference.gather(cache, block_ids, context_len)
