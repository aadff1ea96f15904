"""Times and checks the routed experts of one layer of any engine. Needs torch.

Weights are random. Every run draws new rows and a new routing, so that no data of the last run is still cached.
"""

# T rows, E experts, D model width, F expert width, K experts per row

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .protocol import Method

WEIGHT_STD = 0.02
# rows [T, D] bf16, weights [T, K] float32, expert ids [T, K] int32 -> [T, D] bf16
Run = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Shape:
    """The experts of one layer."""

    num_experts: int
    hidden: int
    width: int
    top_k: int


def experts_method(shape: Shape, make: Callable[[Any, Any], Run]) -> Method:
    """Return the method that times `num_runs` calls of the layer that `make` builds.

    The arguments of `make` are the gate and up weights together, [E, 2 F, D], and the down weights, [E, D, F], in bf16.
    The layer is checked once against float32: `relative_error` is the norm of the difference over the norm of the
    result.
    """
    import torch

    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Any:
        return torch.empty(sizes, dtype=torch.bfloat16).normal_(0, WEIGHT_STD, generator=generator)

    gate_up_EFD = draw(shape.num_experts, 2 * shape.width, shape.hidden)
    down_EDF = draw(shape.num_experts, shape.hidden, shape.width)
    checked = [_Inputs.draw(shape, num_rows, generator) for num_rows in (1, 5)]
    expected = [inputs.reference(gate_up_EFD, down_EDF) for inputs in checked]
    run = make(gate_up_EFD, down_EDF)
    del gate_up_EFD, down_EDF
    results = [run(inputs.rows_TD, inputs.weights_TK, inputs.ids_TK).float() for inputs in checked]
    errors = [((result - truth).norm() / truth.norm()).item() for result, truth in zip(results, expected, strict=True)]

    def method(num_rows: int, num_runs: int) -> Mapping[str, Any]:
        seconds = []
        for index in range(num_runs + 1):
            inputs = _Inputs.draw(shape, num_rows, generator)
            start = time.perf_counter()
            run(inputs.rows_TD, inputs.weights_TK, inputs.ids_TK)
            if index > 0:  # the first call also touches memory and starts threads
                seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "relative_error": max(errors)}

    return method


@dataclass(frozen=True)
class _Inputs:
    rows_TD: Any
    weights_TK: Any
    ids_TK: Any

    @staticmethod
    def draw(shape: Shape, num_rows: int, generator: Any) -> _Inputs:
        import torch

        scores_TE = torch.rand(num_rows, shape.num_experts, generator=generator)
        weights_TK, ids_TK = scores_TE.topk(shape.top_k, dim=-1)
        return _Inputs(
            torch.randn(num_rows, shape.hidden, generator=generator).bfloat16(),
            (weights_TK / weights_TK.sum(-1, keepdim=True)).contiguous(),
            ids_TK.int().contiguous(),
        )

    def reference(self, gate_up_EFD: Any, down_EDF: Any) -> Any:
        import torch

        results_TD = torch.zeros(self.rows_TD.shape)
        for row, (weights_K, ids_K) in enumerate(zip(self.weights_TK, self.ids_TK, strict=True)):
            for weight, expert in zip(weights_K, ids_K.tolist(), strict=True):
                gate_F, up_F = (gate_up_EFD[expert].float() @ self.rows_TD[row].float()).chunk(2)
                results_TD[row] += weight * (down_EDF[expert].float() @ (torch.nn.functional.silu(gate_F) * up_F))
        return results_TD
