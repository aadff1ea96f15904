"""Hyper-connections (arXiv 2409.19606) as DeepSeek-V4 constrains them, as an operation.

The residual is several streams. Coefficients for a token are linear functions of its streams, scaled to unit mean
square: weights by which the streams are added to the input of a network, weights by which its output is added to each
stream, and a matrix that mixes the streams. The matrix is made doubly stochastic by dividing rows and columns by their
sums in turn (Sinkhorn and Knopp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# T tokens, D model width, S streams, X = S * D, C coefficients: S of the input, then S of the output and S * S of the
# matrix


@dataclass(frozen=True, kw_only=True)
class StreamsConfig:
    """The residual streams of a model."""

    num_streams: int
    num_iterations: int  # of divisions by sums of rows and columns
    epsilon: float  # added to the weights of the input, to the entries of the matrix, and to sums

    @property
    def num_coefficients(self) -> int:
        """Coefficients of a network between the streams."""
        return self.num_streams * (2 + self.num_streams)


@dataclass(frozen=True)
class StreamsWeights:
    """The weights of one network's coefficients, all float32: map @ streams * scale + base."""

    map_CX: Tensor
    base_C: Tensor
    scales: Tensor  # one number for each kind of coefficients


class StreamKernels(Protocol):
    """The operations around a network. All arithmetic is in float32."""

    def collapse(self, streams_TX: Tensor, weights: StreamsWeights) -> tuple[Tensor, Tensor]:
        """Return the input of a network [T, D] in the dtype of the streams, and the coefficients [T, C] float32.

        With C = S there is no network behind it: the output is the last of the model.
        """
        ...

    def expand(self, streams_TX: Tensor, update_TD: Tensor, coefficients_TC: Tensor) -> Tensor:
        """Return the streams [T, X] behind a network with these outputs.

        Stream k is post_k * update + the sum over j of matrix_jk * stream j.
        """
        ...
