"""The importances of the inputs of weights: their mean squares in texts.

The error of a product is the sum of the errors of its weights times their inputs. So errors of weights whose inputs are
large matter more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moeserve.layers.weights import AnyWeights
from moeserve.models.checkpoint.packing import weights_of
from moeserve.ops.products.interface import Gather, RowGroups

NUM_SHARED_ROWS = 256  # rows of all weights together that count as rows of each weight, because few rows vary by chance
# share of the mean importance of a weight's inputs that is added for inputs that the texts do not use
LEAST_SHARE = 0.01


class _Counted:
    """A product that also sums the squares of its inputs, by weight and input [e, I]."""

    def __init__(self, weights: AnyWeights) -> None:
        self.product = weights.product
        num_weights, _, num_inputs = weights.shape
        self.squares_eI = torch.zeros(num_weights, num_inputs, dtype=torch.float64)
        self.counts_e = torch.zeros(num_weights, dtype=torch.int64)

    def multiply(self, rows: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Multiply as the product does, for one weight, for weights with their own rows, or for heads."""
        groups = next((each for each in arguments if isinstance(each, RowGroups)), None)
        if groups is not None:
            self._add_groups(rows, groups, *arguments[1:])
        else:
            by_weight_TeI = rows[:, None] if rows.dim() == 2 else rows
            self.squares_eI += by_weight_TeI.double().square().sum(0)
            self.counts_e += len(rows)
        output: Tensor = self.product.multiply(rows, *arguments, **options)
        return output

    def _add_groups(self, rows_RI: Tensor, groups: RowGroups, gather: Gather | None = None) -> None:
        if gather is not None:
            rows_RI = rows_RI[gather.indices_R // gather.divisor]
        self.counts_e += groups.counts_e
        start = 0
        for squares_I, count in zip(self.squares_eI, groups.counts_e.tolist(), strict=True):
            squares_I += rows_RI[start : start + count].double().square().sum(0)
            start += count

    def importances(self) -> Tensor:
        """Return the importances [weights, inputs] float32."""
        shared_I = self.squares_eI.sum(0) / self.counts_e.sum().clamp(min=1)
        total_eI = self.squares_eI + shared_I * NUM_SHARED_ROWS
        mean_eI = total_eI / (self.counts_e + NUM_SHARED_ROWS)[:, None]
        return (mean_eI + LEAST_SHARE * mean_eI.mean(-1, keepdim=True)).float()


def measure(model: nn.Module, run: Iterable[Any]) -> dict[str, Tensor]:
    """Return the importances of the inputs [weights, inputs] float32 of all weights of a model, by module name.

    Args:
        run: iterating over it runs the model. Its kernels must not be captured in graphs.
    """
    counted = {name: (weights, _Counted(weights)) for name, weights in weights_of(model).items()}
    for weights, counting in counted.values():
        weights.product = counting
    try:
        for _ in run:
            pass
    finally:
        for weights, counting in counted.values():
            weights.product = counting.product
    return {name: counting.importances() for name, (_, counting) in counted.items() if counting.counts_e.any()}
