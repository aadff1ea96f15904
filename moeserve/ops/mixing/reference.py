"""Mixing of rows and heads in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.mixing.interface import UNCHANGED, Affine

SMALLEST_LENGTH = 2.0**-23  # of a head before it is scaled


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


def _applied(x_TD: Tensor, function: Affine) -> Tensor:
    wide_TD = x_TD.float()
    if function.bias_D is not None:
        wide_TD = wide_TD + function.bias_D
    return wide_TD if function.scale_D is None else wide_TD * function.scale_D


def _scaled(heads_TNH: Tensor) -> Tensor:
    lengths = heads_TNH.norm(dim=-1, keepdim=True).clamp_min(SMALLEST_LENGTH)
    return heads_TNH * (heads_TNH.shape[-1] ** 0.5 / lengths)
