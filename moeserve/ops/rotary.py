"""The rotation of queries and keys as one operation. Knows no positions: cosines and sines are given."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from moeserve.ops import backend
from moeserve.ops.native import NATIVE_DTYPES, require_native

# T tokens, N heads, H head size, F rotated pairs


class RotaryKernel(Protocol):
    """Turns the first 2 * F values of each head, in float32.

    Args:
        heads_TNH: given away. The result may be in their place, so only the result is to be used.
        cosines_TF: float32.
        sines_TF: float32.
        is_interleaved: a pair is two neighbours (2f, 2f + 1); otherwise it is (f, f + F).
        out_TNH: where the result goes, which may be the heads themselves; None: anywhere.

    Returns:
        [T, N, H] in the dtype of the heads.
    """

    def __call__(
        self,
        heads_TNH: Tensor,
        cosines_TF: Tensor,
        sines_TF: Tensor,
        is_interleaved: bool,
        out_TNH: Tensor | None = None,
        /,
    ) -> Tensor: ...


class Turn(Protocol):
    """How much the heads of each token of a step turn."""

    @property
    def cosines(self) -> Tensor: ...  # [T, F] float32, like the sines

    @property
    def sines(self) -> Tensor: ...

    @property
    def is_interleaved(self) -> bool: ...

    def apply(self, heads_TNH: Tensor) -> Tensor:
        """The heads turned. They are given away: only the result is to be used."""
        ...


def choose_rotary(device: str) -> RotaryKernel:
    """The implementation for a device type."""
    match backend.of(device):
        case "native":
            return functools.partial(_native_rotary, require_native())
        case "triton":
            from moeserve.triton_kernels.rotary import rotary

            return rotary
        case "torch":
            return torch_rotary


def torch_rotary(
    heads_TNH: Tensor, cosines_TF: Tensor, sines_TF: Tensor, is_interleaved: bool, out_TNH: Tensor | None = None
) -> Tensor:
    """The reference. Leaves the heads as they are, if they are not where the result goes."""
    num_pairs = cosines_TF.shape[-1]
    cosines_T1F, sines_T1F = cosines_TF[:, None], sines_TF[:, None]
    turning, staying = heads_TNH.split([2 * num_pairs, heads_TNH.shape[-1] - 2 * num_pairs], dim=-1)
    pair_shape, axis = ((num_pairs, 2), -1) if is_interleaved else ((2, num_pairs), -2)
    first_TNF, second_TNF = turning.float().unflatten(-1, pair_shape).unbind(axis)
    turned = (
        first_TNF * cosines_T1F - second_TNF * sines_T1F,
        second_TNF * cosines_T1F + first_TNF * sines_T1F,
    )
    turned_TNH = torch.stack(turned, dim=axis).flatten(-2).to(heads_TNH.dtype)
    if staying.shape[-1]:
        turned_TNH = torch.cat([turned_TNH, staying], dim=-1)
    return turned_TNH if out_TNH is None else out_TNH.copy_(turned_TNH)


def _native_rotary(
    kernels: ModuleType,
    heads_TNH: Tensor,
    cosines_TF: Tensor,
    sines_TF: Tensor,
    is_interleaved: bool,
    out_TNH: Tensor | None = None,
) -> Tensor:
    if heads_TNH.dtype not in NATIVE_DTYPES:
        return torch_rotary(heads_TNH, cosines_TF, sines_TF, is_interleaved, out_TNH)
    out_TNH = heads_TNH if out_TNH is None else out_TNH
    kernels.turn_heads(heads_TNH, cosines_TF, sines_TF, is_interleaved, out_TNH)
    return out_TNH
