"""Latent attention in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.ops.attention.dense import attend_causally, attend_in_float32
from moeserve.ops.indexer.interface import ChosenEntries
from moeserve.ops.latent_attention.interface import ExpandLatents
from moeserve.step_inputs import StepInputs

# R rows of one chunk, C positions of its context, B blocks, L latent size, P elements of a latent vector, Q queries of
# one chunk: rows times heads; n some heads, K and E parts of a key, H = K + E


class TorchLatentAttention:
    """A `LatentAttentionBackend` that gathers each chunk's vectors and multiplies in float32."""

    takes_all_rows = False

    def __init__(self, scale: float, latent_size: int, whole_num_heads: int, window: int | None = None) -> None:
        """
        Args:
            whole_num_heads: number of query heads of all tp ranks. Unused, because torch determines the order of sums.
        """
        self.scale = scale
        self.latent_size = latent_size
        self.window = window

    def write(self, latent_TP: Tensor, cache: Tensor, step: StepInputs) -> None:
        kept = step.cache_slots >= 0
        cache.flatten(0, 1)[step.cache_slots[kept]] = latent_TP[kept]

    def attend(
        self,
        query_TNP: Tensor,
        cache: Tensor,
        step: StepInputs,
        max_rows: int | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        num_heads = query_TNP.shape[1]
        out_TNL = query_TNP.new_zeros(*query_TNP.shape[:2], self.latent_size)
        for span, block_ids_B in zip(step.spans, step.block_table, strict=True):
            num_rows = min(span.num_rows, span.context_len)
            if num_rows == 0 or (max_rows is not None and num_rows > max_rows):
                continue
            end = span.last_row + 1
            rows = slice(end - num_rows, end)
            position_R = torch.arange(span.context_len - num_rows, span.context_len, device=query_TNP.device)
            latent_CP = gather_latents(cache, block_ids_B, span.context_len)
            attended_QL = attend_in_float32(
                query_TNP[rows].flatten(0, 1),
                latent_CP,
                latent_CP[:, : self.latent_size],
                position_R.repeat_interleave(num_heads),
                scale=self.scale,
                window=self.window,
                sinks_Q=None if sinks_N is None else sinks_N.repeat(num_rows),
            )
            out_TNL[rows] = attended_QL.unflatten(0, (num_rows, num_heads)).to(query_TNP.dtype)
        return out_TNL

    def attend_chosen(
        self, query_TNP: Tensor, cache: Tensor, chosen: ChosenEntries, sinks_N: Tensor | None = None
    ) -> Tensor:
        num_places, vector_size = chosen.slots_TC.shape[1], cache.shape[2]
        out_TNL = query_TNP.new_zeros(*query_TNP.shape[:2], self.latent_size)
        places_C = torch.arange(num_places, device=cache.device)
        rows_at_once = max(1, MAX_EXPANDED_SIZE // max(1, num_places * vector_size))
        for first in range(0, len(query_TNP), rows_at_once):
            part = slice(first, first + rows_at_once)
            is_chosen_RC = places_C < chosen.counts_T[part, None]
            slots_RC = torch.where(is_chosen_RC, chosen.slots_TC[part].long(), 0)
            latent_RCP = cache.flatten(0, 1)[slots_RC].float()
            score_RNC = (query_TNP[part].float() * self.scale) @ latent_RCP.transpose(1, 2)
            score_RNC.masked_fill_(~is_chosen_RC[:, None], float("-inf"))
            if sinks_N is not None:
                score_RNC = torch.cat([score_RNC, sinks_N[:, None].expand(*score_RNC.shape[:2], 1)], dim=2)
            weight_RNC = torch.softmax(score_RNC, dim=-1).nan_to_num(0.0)[..., :num_places]  # rows without entries
            out_TNL[part] = (weight_RNC @ latent_RCP[..., : self.latent_size]).to(query_TNP.dtype)
        return out_TNL

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
        """Attend with a few heads of one chunk at a time, to bound the memory of their keys and values."""
        num_heads, key_size = query_TNK.shape[1:]
        head_size = max(key_size + query_TNE.shape[2], out_TNV.shape[2])
        for span, block_ids_B in zip(step.spans, step.block_table, strict=True):
            num_rows = min(span.num_rows, span.context_len)
            if num_rows <= max_rows:
                continue
            end = span.last_row + 1
            rows = slice(end - num_rows, end)
            latent_CP = gather_latents(cache, block_ids_B, span.context_len)
            heads_at_once = max(1, MAX_EXPANDED_SIZE // (span.context_len * head_size))
            for first_head in range(0, num_heads, heads_at_once):
                heads = slice(first_head, first_head + heads_at_once)
                key_nCK, value_nCV = expand(latent_CP[:, : self.latent_size], heads)
                key_nCE = latent_CP[:, self.latent_size :].expand(len(key_nCK), -1, -1)
                query_RnH = torch.cat([query_TNK[rows, heads], query_TNE[rows, heads]], dim=-1)
                key_nCH = torch.cat([key_nCK, key_nCE], dim=-1)
                out_TNV[rows, heads] = attend_causally(query_RnH, key_nCH, value_nCV, scale=self.scale)


def gather_latents(cache: Tensor, block_ids: Tensor, context_len: int) -> Tensor:
    """Return the vectors [C, P] of a chunk's C = context_len positions. `block_ids` is its row of the block table."""
    num_blocks = -(-context_len // cache.shape[1])
    return cache[block_ids[:num_blocks]].flatten(0, 1)[:context_len]


MAX_EXPANDED_SIZE = 2**24  # elements of keys or values that are expanded or gathered at a time
