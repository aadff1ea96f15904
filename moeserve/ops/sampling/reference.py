"""Sampling of tokens with random numbers from the host: the reference, and functions that the CPU kernels share.

Ties are always ordered by ascending token id.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.config.devices import DEVICES
from moeserve.step_inputs import SAMPLING_SETTINGS

# W fields of SAMPLING_SETTINGS, K kept tokens

Array = npt.NDArray[Any]
# Return a token for each row of float32 scores [R, V], given settings [R] and random numbers in [0, 1), float64 [R].
Draw = Callable[[Tensor, Array, Array], Tensor]
# Maximum number of scores processed together in float32.
FLOAT_PIECE_SIZE = 2**24
UNIFORMS_AT_ONCE = 32


def choose_tokens(scores_RV: Tensor, settings_RW: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
    """Choose tokens as `ChooseTokens` describes. Blocks until the device has computed the scores."""
    return choose_with(row_maximum, draw, scores_RV, settings_RW, positions_R)


def choose_with(
    row_maximum: Callable[[Tensor], tuple[Tensor, Tensor]],
    draw: Draw,
    scores_RV: Tensor,
    settings_RW: Tensor,
    positions_R: Tensor,
) -> tuple[Tensor, Tensor]:
    """Choose tokens as `ChooseTokens` describes, with the given functions for the row maximum and for drawing."""
    highest_R, tokens_R = row_maximum(scores_RV)
    settings = settings_RW.cpu().numpy().view(SAMPLING_SETTINGS)[:, 0]
    is_drawn = settings["temperature"] > 0
    if not is_drawn.any():
        return highest_R, tokens_R
    rows = np.flatnonzero(is_drawn & np.isfinite(highest_R.float().cpu().numpy()))
    num_outputs = positions_R.cpu().numpy() + 1 - settings["num_prompt_tokens"]
    for piece in pieces(rows, scores_RV, in_float32=True):
        some = settings[piece]
        numbers = [uniform(*each) for each in zip(some["seed"].tolist(), num_outputs[piece].tolist(), strict=True)]
        place_P = torch.from_numpy(piece).to(scores_RV.device)
        scores_PV = scores_RV if len(piece) == len(scores_RV) else scores_RV.index_select(0, place_P)
        tokens_R.index_copy_(0, place_P, draw(scores_PV.float(), some, np.array(numbers)))
    return highest_R, tokens_R


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of one position of one request (Philox 4x64-10, Salmon et al. 2011).

    Args:
        position: number of output tokens before this one.
    """
    block, offset = divmod(position, UNIFORMS_AT_ONCE)
    return _uniforms(seed, block)[offset]


@functools.lru_cache(maxsize=4096)
def _uniforms(seed: int, block: int) -> list[float]:
    """Return the random numbers of a block of positions, because starting a generator dominates the time."""
    generator = np.random.Philox(key=seed, counter=block * UNIFORMS_AT_ONCE)
    numbers: list[float] = ((generator.random_raw(4 * UNIFORMS_AT_ONCE)[::4] >> np.uint64(11)) * 2.0**-53).tolist()
    return numbers


def draw(scores_RV: Tensor, settings: Array, numbers: Array) -> Tensor:
    """Draw one token for each row, see `Draw`."""
    drawn = [_draw(*row) for row in zip(scores_RV, settings, numbers.tolist(), strict=True)]
    return torch.tensor(drawn, dtype=torch.int64, device=scores_RV.device)


def _draw(scores_V: Tensor, settings: Any, number: float) -> int:
    """Return the kept token whose share of the cumulative probability contains `number` in [0, 1)."""
    names = ("temperature", "min_p", "top_k", "top_p")
    kept_K, cumulative_K = kept_tokens(scores_V, *(settings[name].item() for name in names))
    # This always finds a token, because the product rounds to less than the last number.
    return int(kept_K[np.searchsorted(cumulative_K, number * cumulative_K[-1], side="right")])


def kept_tokens(
    scores_V: Tensor, temperature: float, min_p: float, top_k: int, top_p: float
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """Return the tokens [K] from which a token is drawn, most likely first, and their cumulative probabilities [K].

    The most likely tokens come first, so each of `min_p`, `top_k` and `top_p` keeps a prefix of the row.
    """
    order_V = tokens_of(order_keys(scores_V[None])[0].sort(descending=True).values)
    # Subtracting the highest before dividing avoids infinity / infinity at the smallest temperatures.
    shifted_V = (scores_V - scores_V.max()).double() / temperature
    probabilities_V = torch.softmax(shifted_V, dim=-1)[order_V].cpu().numpy()
    num_kept = int(np.count_nonzero(probabilities_V >= min_p * probabilities_V[0]))
    if top_k > 0:
        num_kept = min(num_kept, top_k)
    cumulative_V = np.cumsum(probabilities_V[:num_kept])
    if top_p < 1.0:  # the token that reaches the bound is the last
        num_kept = int(np.searchsorted(cumulative_V, top_p * cumulative_V[-1])) + 1
    return order_V[:num_kept], cumulative_V[:num_kept]


def order_keys(scores_RV: Tensor) -> Tensor:
    """Return distinct integers that order tokens by (score descending, id ascending) when sorted descending.

    The upper 32 bits of a key are the float32 score mapped to integer order. The lower 32 bits are the negated id.
    """
    bits_RV = (scores_RV + 0.0).view(torch.int32)  # adding zero makes -0.0 equal to 0.0
    ordered_RV = bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)
    return ordered_RV.long() * 2**32 - torch.arange(scores_RV.shape[1], device=scores_RV.device)


def tokens_of(keys: Tensor) -> Tensor:
    """Return the token ids of keys that `order_keys` returned."""
    return (-keys) & 0xFFFFFFFF


def pieces(rows: Array, scores_RV: Tensor, *, in_float32: bool = False) -> Iterator[Array]:
    """Yield the row indices in pieces, which bound the size of copies of their scores. A piece has at least one row.

    Args:
        in_float32: the caller copies scores to float32, not to float64.
    """
    size = FLOAT_PIECE_SIZE if in_float32 else DEVICES["cpu" if scores_RV.is_cpu else "cuda"].sampling_piece
    num_rows = max(1, size // scores_RV.shape[1])
    for first in range(0, len(rows), num_rows):
        yield rows[first : first + num_rows]


def row_maximum(rows_RV: Tensor) -> tuple[Tensor, Tensor]:
    largest_R, indices_R = rows_RV.max(dim=-1)
    return largest_R, indices_R
