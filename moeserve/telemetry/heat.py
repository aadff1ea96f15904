"""Which colour stands for which load. Knows loads over their mean, not whose they are.

Colours run over a logarithmic scale around the mean, which is always the same one, so that pictures of different runs
can be compared. They get lighter all the way from cold to hot, so that they keep their order for those who see no
hues. What was given nothing at all has a colour outside the scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Colour = tuple[int, int, int]  # red, green, blue, from 0 to 255

NO_LOAD: Colour = (0x7D, 0x8A, 0x97)
NUM_SHADES = 64
# Evenly spaced in lightness (of the space Oklab, from 0.24 to 0.94), the hue turning from indigo over red to yellow.
_ANCHORS = ("180a5a", "441075", "761680", "a92178", "d43c63", "f16448", "fe943c", "fec35c", "fcef83")


@dataclass(frozen=True)
class Scale:
    """From `low` times the mean to `high` times; what is beyond has the colour of the end."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]  # load over mean, as it is written

    def position(self, ratio: float) -> float:
        """Along the scale: 0 is its low end, 1 its high one."""
        return math.log(ratio / self.low) / math.log(self.high / self.low)

    def shades(self, ratios: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """By load over mean: which of `colours()`; -1 for what was given nothing."""
        position = np.log(np.maximum(ratios, 1e-30) / self.low) / math.log(self.high / self.low)
        shades = np.clip(np.floor(position * NUM_SHADES), 0, NUM_SHADES - 1).astype(np.int64)
        return np.where(ratios > 0, shades, -1)


OF_EXPERTS = Scale(1 / 8, 8, ((1 / 8, "1/8"), (1 / 4, "1/4"), (1 / 2, "1/2"), (1, "1"), (2, "2"), (4, "4"), (8, "8")))
OF_RANKS = Scale(1 / 2, 2, ((1 / 2, "1/2"), (1 / math.sqrt(2), "0.7"), (1, "1"), (math.sqrt(2), "1.4"), (2, "2")))


def colours() -> tuple[Colour, ...]:
    """Of all shades, from cold to hot."""
    anchors = np.array([list(bytes.fromhex(anchor)) for anchor in _ANCHORS], dtype=np.float64)
    at = np.linspace(0, len(anchors) - 1, NUM_SHADES)
    channels = [np.rint(np.interp(at, np.arange(len(anchors)), channel)).astype(int) for channel in anchors.T]
    return tuple((int(red), int(green), int(blue)) for red, green, blue in zip(*channels, strict=True))


def over_mean(counts: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    """Each count over the mean of its row; zero in a row where nothing was counted."""
    table = np.array(counts, dtype=np.float64)
    means = table.mean(axis=1, keepdims=True)
    return np.divide(table, means, out=np.zeros_like(table), where=means > 0)


def ticks(numbers: Sequence[int], at_most: int, steps: Sequence[int]) -> list[int]:
    """Which places of an axis are written at: the multiples of the smallest of these steps that leaves few enough.

    Args:
        numbers: of the places, ascending.
        at_most: so many places.
        steps: ascending; of larger steps, the last is doubled.
    """
    step = next((step for step in steps if (numbers[-1] - numbers[0]) // step < at_most), steps[-1])
    while (numbers[-1] - numbers[0]) // step >= at_most:
        step *= 2
    return [place for place, number in enumerate(numbers) if number % step == 0] or [0]


BINARY_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # experts and ranks often are powers of two
DECIMAL_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
