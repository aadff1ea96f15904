"""The choice of each token's experts with a C++ kernel."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moeserve.ops.routing.interface import ChooseCopies, RouterSpec

# W maximum number of copies of an expert


class CpuRouter:
    """A `RouteTokens` in C++."""

    def __init__(self, native: ModuleType, config: RouterSpec) -> None:
        self._native = native
        self._top_k = config.top_k
        self._rules = config.kernel_arguments | {"tolerance": config.tolerance}

    def __call__(
        self,
        hidden_TD: Tensor,
        weight_ED: Tensor,
        bias_E: Tensor | None,
        correction_E: Tensor | None,
        given_TK: Tensor | None = None,
        factors_E: Tensor | None = None,
        out_TK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_TD.shape[0]
        experts_TK = torch.empty(num_tokens, self._top_k, dtype=torch.int64) if out_TK is None else out_TK
        weights_TK = torch.empty(num_tokens, self._top_k, dtype=torch.float32)
        tensors = hidden_TD, weight_ED, bias_E, correction_E, experts_TK, weights_TK
        self._native.route(*tensors, **self._rules, given=given_TK, factors=factors_E)
        return experts_TK, weights_TK


def copies_by(native: ModuleType) -> ChooseCopies:
    """Return the operation, in C++, that chooses among copies of experts."""

    def choose(experts_TK: Tensor, copies_EW: Tensor, num_copies_E: Tensor, first_token: int) -> Tensor:
        chosen_TK = torch.empty(experts_TK.shape, dtype=torch.int64)
        native.choose_copies(experts_TK, copies_EW, num_copies_E, first_token, chosen_TK)
        return chosen_TK

    return choose
