"""Block-sparse attention in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.attention.interface import KeyValueCache
from moeserve.ops.block_sparse.interface import BlockSparseShape
from moeserve.step_inputs import StepInputs

# n heads of the indexer, I size of its keys, R rows of one chunk, C positions of its context, B blocks of positions


class TorchBlockSparse:
    """A `BlockSparseAttention` that computes each chunk with a mask."""

    def __init__(self, shape: BlockSparseShape) -> None:
        self._shape = shape

    def write(self, key_TI: Tensor, index_keys: Tensor, step: StepInputs) -> None:
        kept = step.cache_slots >= 0
        index_keys.flatten(0, 1)[step.cache_slots[kept]] = key_TI[kept]

    def attend(
        self, query_TNH: Tensor, index_query_TnI: Tensor, cache: KeyValueCache, index_keys: Tensor, step: StepInputs
    ) -> Tensor:
        block_size = index_keys.shape[1]
        out_TNV = query_TNH.new_zeros(*query_TNH.shape[:2], cache.values.shape[3])
        for span, blocks in zip(step.spans, step.block_table, strict=True):
            num_rows = min(span.num_rows, span.context_len)
            if num_rows == 0:
                continue
            rows = slice(span.last_row + 1 - num_rows, span.last_row + 1)
            positions_C = torch.arange(span.context_len, device=query_TNH.device)
            blocks_C, offsets_C = blocks[positions_C // block_size].long(), positions_C % block_size
            seen_RnC = self._choose(index_query_TnI[rows], index_keys[blocks_C, offsets_C])
            num_heads = query_TNH.shape[1]
            key_NCH, value_NCV = (
                part[blocks_C, :, offsets_C].transpose(0, 1).repeat_interleave(num_heads // part.shape[1], dim=0)
                for part in (cache.keys, cache.values)
            )
            seen_NRC = seen_RnC.transpose(0, 1).repeat_interleave(num_heads // seen_RnC.shape[1], dim=0)
            attended_NRV = functional.scaled_dot_product_attention(
                query_TNH[rows].transpose(0, 1), key_NCH, value_NCV, seen_NRC, scale=self._shape.attention.scale
            )
            out_TNV[rows] = attended_NRV.transpose(0, 1)
        return out_TNV

    def _choose(self, index_query_RnI: Tensor, key_CI: Tensor) -> Tensor:
        """Return [R, n, C] bool: True where a row, for an indexer's head, attends to a position."""
        shape, num_rows, length = self._shape, len(index_query_RnI), len(key_CI)
        positions_C = torch.arange(length, device=key_CI.device)
        own_R11 = positions_C[length - num_rows :, None, None]
        scores_RnC = (index_query_RnI.float() @ key_CI.float().T).masked_fill(positions_C > own_R11, float("-inf"))
        padded = functional.pad(scores_RnC, (0, -length % shape.block_size), value=float("-inf"))
        scores_RnB = padded.unflatten(2, (-1, shape.block_size)).amax(dim=-1)
        numbers_B = torch.arange(scores_RnB.shape[2], device=key_CI.device)
        own_block_R11 = own_R11 // shape.block_size
        is_local = (numbers_B > own_block_R11 - shape.num_local) & (numbers_B <= own_block_R11)
        scores_RnB = scores_RnB.masked_fill(is_local, float("inf"))
        best_RnK = scores_RnB.sort(dim=2, descending=True, stable=True).indices[..., : shape.top_k]
        chosen_RnB = torch.zeros_like(scores_RnB, dtype=torch.bool).scatter(2, best_RnK, True)
        chosen_RnC = chosen_RnB.repeat_interleave(shape.block_size, dim=2)[..., :length]
        return chosen_RnC & (positions_C <= own_R11)
