"""The draw of a random token from each row of scores as one operation, where a device has a kernel for it."""

from __future__ import annotations

import functools
from typing import Protocol

from torch import Tensor

from moeserve.ops import backend

# R rows, V vocabulary


class DrawKernel(Protocol):
    """Draws one token [R] int64 from each row: the tokens that are kept, most likely first, are laid side by side.

    Of equally likely tokens the lower id comes first. `min_p`, then `top_k`, then `top_p` keep a beginning of the row.

    Args:
        scores_RV: float32; minus infinity: never drawn.
        temperature_R: float32, above zero.
        top_k_R: int64; 0 or less: all.
        top_p_R: float32
        min_p_R: float32
        uniform_R: float64, from 0 to 1, without 1: where in the kept tokens' probability the token is found.
    """

    def __call__(
        self,
        scores_RV: Tensor,
        temperature_R: Tensor,
        top_k_R: Tensor,
        top_p_R: Tensor,
        min_p_R: Tensor,
        uniform_R: Tensor,
        /,
    ) -> Tensor: ...


@functools.cache
def choose_draw(device: str) -> DrawKernel | None:
    """The kernel for a device type; None: there is none."""
    if backend.of(device) != "triton":
        return None
    from moeserve.triton_kernels.sampling import sample_rows

    return sample_rows
