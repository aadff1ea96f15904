"""Operations that mix rows, or the heads of rows, as Zaya and Inkling 2 do."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

# N query heads, G key heads, e = N + G heads; S sums, Q queries

MAX_SUMS = 128  # maximum number of sums that are attended to


class Affine(NamedTuple):
    """The function (x + bias) * scale of each column, in float32. None changes nothing."""

    scale_D: Tensor | None = None
    bias_D: Tensor | None = None


UNCHANGED = Affine()


class Mixing(Protocol):
    """Operations on rows. Each row is computed by itself, in float32, and rounded once to the dtype of the inputs."""

    def add(self, a_TD: Tensor, of_a: Affine, b_TD: Tensor | None = None, of_b: Affine = UNCHANGED) -> Tensor:
        """Return of_a(a) + of_b(b), [T, D]; without b, return of_a(a)."""
        ...

    def gelu(self, x_TD: Tensor) -> Tensor:
        """Return x / 2 * (1 + erf(x / sqrt(2)))."""
        ...

    def mix_heads(self, projected_TX: Tensor, convolved_TeH: Tensor, temperatures_G: Tensor) -> Tensor:
        """Return queries and keys [T, e, H] of compressed convolutional attention (arXiv 2510.04476).

        Half the sum of a query and its group's key is added to the convolved query. The mean of these halves over the
        group is added to the convolved key. Queries and keys are scaled to the length sqrt(H), and each key is then
        multiplied by its temperature.

        Args:
            projected_TX: queries and keys [T, e * H]; a view of a projection.
            convolved_TeH: contiguous.
            temperatures_G: float32.
        """
        ...

    def limit_lengths(self, heads_TNH: Tensor, limit: float, scale_NH: Tensor | None = None) -> Tensor:
        """Return heads multiplied by `scale_NH` (float32), and scaled down to the length `limit` if they are longer.

        Args:
            heads_TNH: a view of a projection.
        """
        ...

    def attend_sums(
        self, sums_TSD: Tensor, num_sums: int, update_TD: Tensor | None, *, begins: bool, queries_QD: Tensor | None
    ) -> Tensor | None:
        """Add the update to the last of the first `num_sums` sums, and attend from the queries to these sums.

        Return the results [T, Q, D], or None without queries. Sums are divided by their root mean square, and are then
        both keys and values.

        Args:
            sums_TSD: changed in place.
            begins: True: the update replaces the last sum.
            queries_QD: float32; None: there is no result.
        """
        ...
