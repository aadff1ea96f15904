"""The choice of the next tokens, as a protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

# W fields of SAMPLING_SETTINGS


class ChooseTokens(Protocol):
    """Choose the next token of each row: the most likely token at temperature 0, otherwise a random token.

    Tokens are ordered by probability, ties by id. `min_p`, then `top_k`, then `top_p` each keep a prefix of this order.
    A random number selects a token by the cumulative probabilities of the kept tokens. A counter-based generator
    (Philox 4x64-10, Salmon et al. 2011) makes the number, so the number depends only on the seed and the number of
    previous output tokens.

    Args:
        scores_RV: any floating dtype; a token with minus infinity is never chosen if the row has another number.
        settings_RW: int64, records of `SAMPLING_SETTINGS`.
        positions_R: int64, position of the newest token of each row in its request.

    Returns:
        The highest score of each row, in a dtype that holds it exactly, and the tokens [R] int64. NaN counts as the
        highest score. The token of a row whose highest score is not finite is arbitrary.
    """

    def __call__(self, scores_RV: Tensor, settings_RW: Tensor, positions_R: Tensor, /) -> tuple[Tensor, Tensor]: ...


class SamplingOperations(NamedTuple):
    """The operations of a sampler."""

    # rows_RV -> the largest number of each row [R], in a dtype that holds it exactly, and its index [R] int64. Ties go
    # to the lowest index, and NaN is larger than any number. Rows are contiguous.
    row_maximum: Callable[[Tensor], tuple[Tensor, Tensor]]
    choose_tokens: ChooseTokens
