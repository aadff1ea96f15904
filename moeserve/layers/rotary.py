"""Rotary position embedding: the angles of a step, computed once, and the rotation of queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.ops.rotary import RotaryKernel, choose_rotary

# T tokens, N heads, H head size, F rotated pairs


@dataclass(frozen=True)
class LinearScaling:
    """Divides every frequency by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:
        return frequencies_F / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Divides the slow frequencies by `factor`, keeps the fast ones, and blends in between (Llama 3.1 release).

    Slow are those whose wavelength exceeds original_max_position_embeddings / low_freq_factor.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:
        turns_F = self.original_max_position_embeddings * frequencies_F / (2 * math.pi)
        keep_F = (turns_F - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep_F = keep_F.clamp(0.0, 1.0)
        return keep_F * frequencies_F + (1 - keep_F) * frequencies_F / self.factor


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): the same idea, with the blend laid over the pairs' indices instead of their frequencies.

    Pairs that turn more than `beta_fast` times within the original context are kept, those that turn less than
    `beta_slow` times are divided by `factor`. Attention is sharpened to make up for the longer context: cosines and
    sines are multiplied by `attention_factor`, and scores by `score_factor`, where a model asks for it (DeepSeek).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # whether the ends of the blend are rounded outwards to whole indices
    attention_factor: float
    score_factor: float = 1.0

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:
        num_pairs = len(frequencies_F)

        def pair_that_turns(times: float) -> float:
            wavelengths = self.original_max_position_embeddings / (times * 2 * math.pi)
            return num_pairs * math.log(wavelengths) / math.log(theta)

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * num_pairs - 1)
        width = last - first or 0.001
        divide_F = ((torch.arange(num_pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
        return divide_F * frequencies_F / self.factor + (1 - divide_F) * frequencies_F


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Which values of a head turn, and how fast. The scalings are those of published checkpoints."""

    dim: int  # values of a head that turn, an even number: the first ones; the rest stay as they are
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    is_interleaved: bool = False  # a pair is two neighbours (2f, 2f + 1); otherwise it is (f, f + dim / 2)

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied with."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0

    @property
    def score_factor(self) -> float:
        """What the products of queries and keys are multiplied with, beside the usual scale."""
        return self.scaling.score_factor if isinstance(self.scaling, YarnScaling) else 1.0

    def frequencies(self) -> Tensor:
        """Radians per position of each pair, [F] float32."""
        exponents_F = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        frequencies_F = 1.0 / self.theta**exponents_F
        return frequencies_F if self.scaling is None else self.scaling.scale(frequencies_F, self.theta)


class Rotary:
    """The frequencies of a model, on its device."""

    def __init__(self, config: RotaryConfig, device: torch.device) -> None:
        self.config = config
        self.frequencies_F = config.frequencies().to(device)
        self.kernel = choose_rotary(device.type)

    def at(self, positions_T: Tensor) -> Rotation:
        """The rotation of a step's tokens. Angles are computed in float32."""
        angles_TF = torch.outer(positions_T.to(torch.float32), self.frequencies_F)
        cosines_TF, sines_TF = angles_TF.cos(), angles_TF.sin()
        if (factor := self.config.attention_factor) != 1.0:
            cosines_TF, sines_TF = cosines_TF * factor, sines_TF * factor
        return Rotation(cosines_TF, sines_TF, self.config.is_interleaved, self.kernel)


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of one step's positions, shared by all layers. [T, F] float32 each."""

    cosines: Tensor
    sines: Tensor
    is_interleaved: bool
    kernel: RotaryKernel

    def apply(self, heads_TNH: Tensor, out_TNH: Tensor | None = None) -> Tensor:
        """Turns the first 2 * F values of each head, in float32. Returns the dtype it was given.

        The heads are given away: where they lie, the result may lie afterwards. They may be a view of a projection.

        Args:
            out_TNH: where the result goes, which may be the heads themselves; None: anywhere.
        """
        return self.kernel(heads_TNH, self.cosines, self.sines, self.is_interleaved, out_TNH)
