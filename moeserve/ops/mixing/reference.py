"""Mixing of rows and heads in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.mixing.interface import UNCHANGED, Affine

SMALLEST_LENGTH = 2.0**-23  # minimum length of a head before the head is scaled
ADDED_LENGTH = 1e-6
SUM_EPSILON = 1e-6


class TorchMixing:
    """`Mixing` in plain torch."""

    def add(self, a_TD: Tensor, of_a: Affine, b_TD: Tensor | None = None, of_b: Affine = UNCHANGED) -> Tensor:
        sum_TD = _applied(a_TD, of_a)
        if b_TD is not None:
            sum_TD = sum_TD + _applied(b_TD, of_b)
        return sum_TD.to(a_TD.dtype)

    def gelu(self, x_TD: Tensor) -> Tensor:
        return functional.gelu(x_TD.float()).to(x_TD.dtype)

    def mix_heads(self, projected_TX: Tensor, convolved_TeH: Tensor, temperatures_G: Tensor) -> Tensor:
        (_, num_all, size), num_key_heads = convolved_TeH.shape, len(temperatures_G)
        heads_TeH = projected_TX.float().unflatten(1, (num_all, size))
        query_TNH, key_TGH = heads_TeH.split([num_all - num_key_heads, num_key_heads], dim=1)
        halves_TGnH = (query_TNH.unflatten(1, (num_key_heads, -1)) + key_TGH[:, :, None]) * 0.5
        query_TNH = halves_TGnH.flatten(1, 2) + convolved_TeH[:, :-num_key_heads].float()
        key_TGH = halves_TGnH.mean(dim=2) + convolved_TeH[:, -num_key_heads:].float()
        query_TNH, key_TGH = _scaled(query_TNH), _scaled(key_TGH) * temperatures_G[:, None]
        return torch.cat([query_TNH, key_TGH], dim=1).to(convolved_TeH.dtype)

    def limit_lengths(self, heads_TNH: Tensor, limit: float, scale_NH: Tensor | None = None) -> Tensor:
        wide_TNH = heads_TNH.float() if scale_NH is None else heads_TNH.float() * scale_NH
        lengths = wide_TNH.norm(dim=-1, keepdim=True)
        return (wide_TNH * (limit / (lengths + ADDED_LENGTH)).clamp(max=1.0)).to(heads_TNH.dtype)

    def attend_sums(
        self, sums_TSD: Tensor, num_sums: int, update_TD: Tensor | None, *, begins: bool, queries_QD: Tensor | None
    ) -> Tensor | None:
        last_TD = sums_TSD[:, num_sums - 1]
        if update_TD is not None:
            last_TD.copy_(update_TD if begins else last_TD + update_TD)
        if queries_QD is None:
            return None
        wide_TSD = sums_TSD[:, :num_sums].float()
        normed_TSD = wide_TSD * (wide_TSD.square().mean(dim=-1, keepdim=True) + SUM_EPSILON).rsqrt()
        weights_TQS = ((queries_QD * queries_QD.shape[1] ** -0.5) @ normed_TSD.transpose(1, 2)).softmax(dim=-1)
        return (weights_TQS @ normed_TSD).to(sums_TSD.dtype)


def _applied(x_TD: Tensor, function: Affine) -> Tensor:
    wide_TD = x_TD.float()
    if function.bias_D is not None:
        wide_TD = wide_TD + function.bias_D
    return wide_TD if function.scale_D is None else wide_TD * function.scale_D


def _scaled(heads_TNH: Tensor) -> Tensor:
    lengths = heads_TNH.norm(dim=-1, keepdim=True).clamp_min(SMALLEST_LENGTH)
    return heads_TNH * (heads_TNH.shape[-1] ** 0.5 / lengths)
