"""Hyper-connections (arXiv 2409.19606) with DeepSeek-V4's constraints, as an operation.

The residual consists of several streams. A token's coefficients are computed from linear functions of its streams,
which are first scaled to unit mean square. The coefficients are the weights with which the streams are summed to the
input of a sublayer, the weights with which the sublayer's output is added to each stream, and a matrix that mixes the
streams. Alternately dividing rows and columns by their sums makes the matrix doubly stochastic (Sinkhorn and Knopp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# S streams, X = S * D, C coefficients: S for the input, then S for the output and S * S of the matrix


@dataclass(frozen=True, kw_only=True)
class StreamsSpec:
    """The configuration of a model's residual streams."""

    num_streams: int
    num_iterations: int  # number of divisions by the sums of rows and columns; 0: no matrix mixes the streams (HY-V4)
    epsilon: float  # added to the weights of the input, to the entries of the matrix, and to its sums
    output_factor: float = 2.0  # multiplies the sigmoids that are the weights of the output
    output_epsilon: float = 0.0  # added to the weights of the output

    @property
    def num_kinds(self) -> int:
        """Number of kinds of coefficients of a sublayer."""
        return 3 if self.num_iterations else 2

    @property
    def num_coefficients(self) -> int:
        """Number of coefficients of a sublayer."""
        return self.num_streams * (2 + self.num_streams * (self.num_iterations > 0))


@dataclass(frozen=True)
class StreamsWeights:
    """The weights that compute one sublayer's coefficients, all float32: map @ streams * scale + base."""

    map_CX: Tensor
    base_C: Tensor
    scales: Tensor  # one number for each kind of coefficients


class StreamKernels(Protocol):
    """The operations before and after a sublayer. All arithmetic is in float32."""

    def collapse(self, streams_TX: Tensor, weights: StreamsWeights) -> tuple[Tensor, Tensor]:
        """Return the input of a sublayer [T, D] in the dtype of the streams, and the coefficients [T, C] float32.

        C = S at the end of the model, where no sublayer follows: the result is the model's final hidden state.
        """
        ...

    def expand(self, streams_TX: Tensor, update_TD: Tensor, coefficients_TC: Tensor) -> Tensor:
        """Return the streams [T, X] after a sublayer with the outputs `update_TD`.

        New stream k is weight_k * update + (sum over j of matrix_jk * stream_j). Without a matrix, the sum is stream_k.
        """
        ...
