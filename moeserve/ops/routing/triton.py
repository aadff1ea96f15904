"""The choice of each token's experts with Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.routing.interface import RouterSpec
from moeserve.ops.routing.reference import TorchRouter
from moeserve.triton_kernels.chunked_matmul import chunked_matmul
from moeserve.triton_kernels.routing import MAX_WEIGHED_TOKENS, can_weigh, route


class TritonRouter:
    """A `RouteTokens` in Triton. One kernel computes everything for few tokens, or everything except logits for many.

    The kernel's programs count arrivals in memory of this object, so calls must not overlap.
    """

    def __init__(self, config: RouterSpec) -> None:
        self._rules: dict[str, Any] = {"top_k": config.top_k, **config.kernel_arguments}
        self._arrivals_T: Tensor | None = None
        self._reference = TorchRouter(config)

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
        assert factors_E is None, "models with factors of experts run on CPUs"
        assert out_TK is None, "routes are returned on CPUs alone"
        if given_TK is not None:  # only in a few layers of a model
            return self._reference(hidden_TD, weight_ED, bias_E, correction_E, given_TK)
        if not can_weigh(hidden_TD, weight_ED):
            return route(functional.linear(hidden_TD.float(), weight_ED, bias_E), correction_E, **self._rules)
        if self._arrivals_T is None:
            self._arrivals_T = hidden_TD.new_zeros(MAX_WEIGHED_TOKENS, dtype=torch.int32)
        given: dict[str, Any] = {"weight_ED": weight_ED, "bias_E": bias_E, "arrivals_T": self._arrivals_T}
        return route(hidden_TD, correction_E, **given, **self._rules)


class OrderedRouter:
    """A batch-invariant `RouteTokens` in Triton."""

    def __init__(self, config: RouterSpec) -> None:
        self._top_k = config.top_k
        self._rules = config.kernel_arguments

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
        assert given_TK is None, "models whose experts follow from token ids run on CPUs"
        assert factors_E is None, "models with factors of experts run on CPUs"
        assert out_TK is None, "routes are returned on CPUs alone"
        logits_TE = chunked_matmul(hidden_TD.float(), weight_ED, bias_O=bias_E)
        return route(logits_TE, correction_E, top_k=self._top_k, **self._rules)
