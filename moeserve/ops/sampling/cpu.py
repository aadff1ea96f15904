"""The choice of the next tokens with C++ kernels."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from moeserve.ops.sampling.reference import Array, choose_with

# W fields of SAMPLING_SETTINGS


class CpuSampling:
    """The operations of a sampler in C++."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native

    def row_maximum(self, rows_RV: Tensor) -> tuple[Tensor, Tensor]:
        largest_R = torch.empty(len(rows_RV), dtype=torch.float32)
        indices_R = torch.empty(len(rows_RV), dtype=torch.int64)
        self._native.row_maximum(rows_RV, largest_R, indices_R)
        return largest_R, indices_R

    def choose_tokens(self, scores_RV: Tensor, settings_RW: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        return choose_with(self.row_maximum, self._draw_tokens, scores_RV, settings_RW, positions_R)

    def _draw_tokens(self, scores_RV: Tensor, settings: Array, numbers: Array) -> Tensor:
        tokens_R = torch.empty(len(scores_RV), dtype=torch.int64)
        self._native.draw_tokens(
            scores_RV,
            torch.from_numpy(settings["temperature"].astype(np.float32)),
            torch.from_numpy(settings["top_k"].copy()),
            torch.from_numpy(settings["top_p"].astype(np.float32)),
            torch.from_numpy(settings["min_p"].astype(np.float32)),
            torch.from_numpy(numbers),
            tokens_R,
        )
        return tokens_R
