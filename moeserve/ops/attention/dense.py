"""Attention of rows over the keys and values of one context, without a cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# C positions of a context, the last of which are the R rows; Q queries that share keys and values

MAX_MASK_SIZE = 2**22  # maximum number of elements of a mask or of scores, rows times positions, in memory at a time


def attend_causally(
    query_RNH: Tensor,
    key_GCH: Tensor,
    value_GCV: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks_N: Tensor | None = None,
    biases_RNE: Tensor | None = None,
) -> Tensor:
    """Attend causally from R rows, which are the last of C positions, to the keys and values of one context.

    Args:
        query_RNH: query head n reads key-value head n // (N // G).
        window: maximum number of positions that a row attends to, including its own; None: all positions up to its own.
            If negative, positions are divided into chunks of -window, and a row attends only to its own chunk.
        sinks_N: None, or an additional score without a value: [N] float32 for each query head, or [R, N] for each row.
        biases_RNE: added to the scores of positions by their distance, or None; see `AttentionBackend.attend`.

    Returns:
        [R, N, V] in the dtype of the queries.
    """
    if sinks_N is not None or biases_RNE is not None:
        return _attend_in_float32(query_RNH, key_GCH, value_GCV, scale, window, sinks_N, biases_RNE)
    num_rows, context_len = query_RNH.shape[0], key_GCH.shape[1]
    value_size = value_GCV.shape[-1]
    # Torch's fast path needs queries, keys and values of one size. Padding with zeros does not change the scores, and
    # the padded values are cut off the result.
    size = max(query_RNH.shape[-1], value_size)
    query_RNH, key_GCH, value_GCV = (_widened(heads, size) for heads in (query_RNH, key_GCH, value_GCV))

    # If the rows are the whole context, torch needs no mask and skips the masked half.
    if num_rows == context_len and (window is None or abs(window) >= context_len):
        return _multiply(query_RNH, key_GCH, value_GCV, scale, visible_RC=None)[..., :value_size]
    rows_at_once = max(1, MAX_MASK_SIZE // context_len)
    pieces = []
    for first_row in range(0, num_rows, rows_at_once):
        piece_RNH = query_RNH[first_row : first_row + rows_at_once]
        position_R = torch.arange(len(piece_RNH), device=query_RNH.device) + context_len - num_rows + first_row
        visible_RC = visible_positions(position_R, context_len, window)
        pieces.append(_multiply(piece_RNH, key_GCH, value_GCV, scale, visible_RC)[..., :value_size])
    return torch.cat(pieces)


def _widened(heads: Tensor, size: int) -> Tensor:
    return heads if heads.shape[-1] == size else functional.pad(heads, (0, size - heads.shape[-1]))


def _multiply(query_RNH: Tensor, key_GCH: Tensor, value_GCH: Tensor, scale: float, visible_RC: Tensor | None) -> Tensor:
    attended_1NRH = functional.scaled_dot_product_attention(
        query_RNH.transpose(0, 1)[None],
        key_GCH[None],
        value_GCH[None],
        attn_mask=visible_RC,
        is_causal=visible_RC is None,
        scale=scale,
        enable_gqa=query_RNH.shape[1] != key_GCH.shape[0],
    )
    return attended_1NRH[0].transpose(0, 1)


def _attend_in_float32(
    query_RNH: Tensor,
    key_GCH: Tensor,
    value_GCV: Tensor,
    scale: float,
    window: int | None,
    sinks_N: Tensor | None,
    biases_RNE: Tensor | None,
) -> Tensor:
    """Attend with one key-value head at a time in float32, because torch's attention supports no sinks or biases."""
    num_rows, num_heads, _ = query_RNH.shape
    num_kv_heads, context_len, _ = key_GCH.shape
    group = num_heads // num_kv_heads
    position_R = torch.arange(context_len - num_rows, context_len, device=query_RNH.device)
    attended_RNV = query_RNH.new_empty(num_rows, num_heads, value_GCV.shape[-1])
    for kv_head in range(num_kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        attended_QV = attend_in_float32(
            query_RNH[:, heads].flatten(0, 1),
            key_GCH[kv_head],
            value_GCV[kv_head],
            position_R.repeat_interleave(group),
            scale=scale,
            window=window,
            sinks_Q=None if sinks_N is None else sinks_N[..., heads].expand(num_rows, group).flatten(),
            biases_QE=None if biases_RNE is None else biases_RNE[:, heads].flatten(0, 1),
        )
        attended_RNV[:, heads] = attended_QV.unflatten(0, (num_rows, group)).to(query_RNH.dtype)
    return attended_RNV


def attend_in_float32(
    query_QH: Tensor,
    key_CH: Tensor,
    value_CV: Tensor,
    position_Q: Tensor,
    *,
    scale: float,
    window: int | None,
    sinks_Q: Tensor | None = None,
    biases_QE: Tensor | None = None,
) -> Tensor:
    """Attend in float32 with explicit scores, a few queries at a time to bound the memory of the scores.

    Args:
        position_Q: position of each query.
        window: see `attend_causally`.
        sinks_Q: float32, an additional score for each query, without a value; or None.
        biases_QE: added to the scores of positions by their distance, or None.

    Returns:
        [Q, V] float32.
    """
    attended_QV = query_QH.new_empty(len(query_QH), value_CV.shape[1], dtype=torch.float32)
    key_HC, value_CV = key_CH.float().T, value_CV.float()
    queries_at_once = max(1, MAX_MASK_SIZE // len(key_CH))
    for start in range(0, len(query_QH), queries_at_once):
        part = slice(start, start + queries_at_once)
        score_QC = (query_QH[part].float() * scale) @ key_HC
        if biases_QE is not None:
            distance_QC = position_Q[part, None] - torch.arange(len(key_CH), device=query_QH.device)
            num_distances = biases_QE.shape[1]
            bias_QC = biases_QE[part].float().gather(1, distance_QC.clamp(0, num_distances - 1))
            score_QC += bias_QC.masked_fill(distance_QC >= num_distances, 0.0)
        score_QC.masked_fill_(~visible_positions(position_Q[part], len(key_CH), window), float("-inf"))
        if sinks_Q is not None:
            score_QC = torch.cat([score_QC, sinks_Q[part, None]], dim=1)
        weight_QC = torch.softmax(score_QC, dim=-1)[:, : len(key_CH)]
        attended_QV[part] = weight_QC @ value_CV
    return attended_QV


def visible_positions(position_Q: Tensor, num_positions: int, window: int | None) -> Tensor:
    """Return [Q, num_positions] bool: True where a query at `position_Q` attends to a position."""
    position_Q1 = position_Q[:, None]
    position_C = torch.arange(num_positions, device=position_Q.device)
    visible_QC = position_C <= position_Q1
    if window is not None:
        first_Q1 = position_Q1 - position_Q1 % -window if window < 0 else position_Q1 - window + 1
        visible_QC &= position_C >= first_Q1
    return visible_QC


def first_visible(position: int, window: int) -> int:
    """Return the first position that a row at `position` attends to."""
    return position - position % -window if window < 0 else max(0, position - window + 1)
