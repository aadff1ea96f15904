"""Rotary position embedding (arXiv 2104.09864): the angles of a step's tokens, computed once for all layers.

Layers may have different frequencies. Query temperatures, which also depend on positions, are expressed as rotations
too, so that they need no kernels of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from moeserve.ops.rows.interface import Rotation

# F rotated pairs


@dataclass(frozen=True)
class LinearScaling:
    """Divides every frequency by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:
        return frequencies_F / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Divides slow frequencies by `factor`, keeps fast frequencies, and blends in between (Llama 3.1 release).

    A frequency is slow if its wavelength exceeds original_max_position_embeddings / low_freq_factor, and fast if its
    wavelength is below original_max_position_embeddings / high_freq_factor.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:
        cycles_F = self.original_max_position_embeddings * frequencies_F / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor or 1e-9  # Llama 4 has no blend
        keep_F = (cycles_F - self.low_freq_factor) / width
        keep_F = keep_F.clamp(0.0, 1.0)
        return keep_F * frequencies_F + (1 - keep_F) * frequencies_F / self.factor


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): like `Llama3Scaling`, with the blend over the pairs' indices, not their frequencies.

    The frequencies of pairs with more than `beta_fast` cycles within the original context are kept, and frequencies of
    pairs with fewer than `beta_slow` cycles are divided by `factor`. To make up for the longer context, cosines and
    sines are multiplied by `attention_factor`, and scores by `score_factor` where a model defines it (DeepSeek).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # round the ends of the blend outwards to whole indices
    attention_factor: float
    score_factor: float = 1.0

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:
        num_pairs = len(frequencies_F)

        def pair_with_cycles(count: float) -> float:
            wavelengths = self.original_max_position_embeddings / (count * 2 * math.pi)
            return num_pairs * math.log(wavelengths) / math.log(theta)

        first, last = pair_with_cycles(self.beta_fast), pair_with_cycles(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * num_pairs - 1)
        width = last - first or 0.001
        divide_F = ((torch.arange(num_pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
        return divide_F * frequencies_F / self.factor + (1 - divide_F) * frequencies_F


@dataclass(frozen=True)
class NtkScaling:
    """Stretches the base of the frequencies: theta * alpha**(dim / (dim - 2)) (Hunyuan)."""

    alpha: float

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:
        num_pairs = len(frequencies_F)
        exponents_F = torch.arange(num_pairs, dtype=torch.float32) / num_pairs
        return 1.0 / (theta * self.alpha ** (num_pairs / (num_pairs - 1))) ** exponents_F


@dataclass(frozen=True)
class ProportionalScaling:
    """Rotates only the first pairs, a `fraction` of all. Frequencies are as if all pairs were rotated (Gemma 4)."""

    fraction: float
    factor: float = 1.0  # divides the frequencies

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:
        num_pairs = len(frequencies_F)
        is_rotated_F = torch.arange(num_pairs) < int(self.fraction * 2 * num_pairs // 2)
        return torch.where(is_rotated_F, frequencies_F / self.factor, 0.0)


@dataclass(frozen=True)
class PairScaling:
    """Divides the frequency of each of the F pairs by that pair's divisor."""

    divisors: tuple[float, ...]
    attention_factor: float

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:
        return frequencies_F / torch.tensor(self.divisors, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): one scaling within the original context, and another scaling beyond it.

    As in vLLM, `max_model_len` chooses one of the two scalings for all requests. The authors' code changes to the long
    scaling when a request grows beyond the original context, and then reads keys that were rotated with either scaling.
    """

    short: PairScaling
    long: PairScaling
    original_max_position_embeddings: int

    def is_long(self, max_model_len: int) -> bool:
        return max_model_len > self.original_max_position_embeddings


@dataclass(frozen=True)
class NoScaling:
    """Sets every frequency to zero: nothing is rotated, only multiplied by a constant."""

    attention_factor: float = 1.0

    def scale(self, frequencies_F: Tensor, theta: float) -> Tensor:
        return torch.zeros_like(frequencies_F)


Scaling: TypeAlias = (
    LinearScaling | Llama3Scaling | YarnScaling | NtkScaling | ProportionalScaling | PairScaling | NoScaling
)


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """The rotated values of a head and their frequencies. Published checkpoints use all these scalings."""

    dim: int  # even number of values at the beginning of a head that are rotated
    theta: float
    scaling: Scaling | LongRopeScaling | None = None
    is_interleaved: bool = False  # a pair is two neighbours (2f, 2f + 1); otherwise it is (f, f + dim / 2)
    stride: int = 1  # positions are rounded down to multiples of this: all tokens of a window rotate alike
    is_reversed: bool = False  # rotate by the negative angle, which undoes a rotation
    has_learned_factors: bool = False  # exponentials of learned numbers multiply the frequencies (LeRoPE)

    def within(self, max_model_len: int) -> RotarySpec:
        """Return this configuration with the one LongRoPE scaling that `max_model_len` (in tokens) chooses."""
        if not isinstance(self.scaling, LongRopeScaling):
            return self
        is_long = self.scaling.is_long(max_model_len)
        return replace(self, scaling=self.scaling.long if is_long else self.scaling.short)

    @property
    def attention_factor(self) -> float:
        """The factor that multiplies cosines and sines."""
        kinds = YarnScaling | PairScaling | NoScaling
        return self.scaling.attention_factor if isinstance(self.scaling, kinds) else 1.0

    @property
    def score_factor(self) -> float:
        """The factor that multiplies attention scores, in addition to the usual scale."""
        return self.scaling.score_factor if isinstance(self.scaling, YarnScaling) else 1.0

    def frequencies(self) -> Tensor:
        """Return the radians per position of each pair, [F] float32."""
        exponents_F = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        frequencies_F = 1.0 / self.theta**exponents_F
        assert not isinstance(self.scaling, LongRopeScaling), "the length of requests chooses one of two scalings"
        return frequencies_F if self.scaling is None else self.scaling.scale(frequencies_F, self.theta)


class Rotary(nn.Module):
    """The frequencies of one rotary embedding, on the model's device."""

    log_factors_F: nn.Parameter | None

    def __init__(self, config: RotarySpec, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.frequencies_F = config.frequencies().to(device)
        self.register_parameter("log_factors_F", None)
        if config.has_learned_factors:
            self.log_factors_F = nn.Parameter(torch.empty_like(self.frequencies_F), requires_grad=False)

    def at(self, positions_T: Tensor) -> Rotation:
        """Return the cosines and sines [T, F] of the angles of a step's tokens, computed in float32."""
        if self.config.stride != 1:
            positions_T = positions_T - positions_T % self.config.stride
        frequencies_F = self.frequencies_F
        if self.log_factors_F is not None:
            frequencies_F = frequencies_F * self.log_factors_F.exp()
        angles_TF = torch.outer(positions_T.to(torch.float32), frequencies_F)
        cosines_TF, sines_TF = angles_TF.cos(), angles_TF.sin()
        if self.config.is_reversed:
            sines_TF = -sines_TF
        if (factor := self.config.attention_factor) != 1.0:
            cosines_TF, sines_TF = cosines_TF * factor, sines_TF * factor
        return Rotation(cosines_TF, sines_TF, self.config.is_interleaved)


# For layers without rotary embedding: a rotation by zero. The cosine of zero is exactly one, so bytes do not change.
NO_ROTARY = RotarySpec(dim=2, theta=2.0, scaling=NoScaling())
# For latent attention whose vectors have no rotated part.
NO_ROTATED_PART = RotarySpec(dim=0, theta=2.0)


def constant_factor(dim: int, factor: float) -> RotarySpec:
    """Return a multiplication of heads of `dim` values by a constant, in the form of a rotation by an angle of zero."""
    return RotarySpec(dim=dim, theta=2.0, scaling=NoScaling(factor))


@dataclass(frozen=True, kw_only=True)
class TemperatureSpec:
    """The factor of a query at position p: 1 + weight * ln(1 + floor((p + offset) / length)) (arXiv 2501.19399).

    If `is_power`, the factor is (1 + (p + offset) / length) ** weight (Beam). If `is_continuous`, the factor is
    1 + weight * ln(max(1, (p + offset) / length)) (Inkling). A temperature has the form of a rotation by an angle of
    zero, whose cosines are the factor.
    """

    dim: int  # even number of values of a query
    weight: float
    length: int
    offset: int = 0
    is_power: bool = False
    is_continuous: bool = False

    def at(self, positions_T: Tensor) -> Rotation:
        lengths_T = (positions_T.to(torch.float32) + self.offset) / self.length
        if self.is_power:
            factors_T = (self.weight * torch.log1p(lengths_T)).exp()
        elif self.is_continuous:
            factors_T = 1.0 + self.weight * lengths_T.clamp(min=1.0).log()
        else:
            factors_T = 1.0 + self.weight * torch.log1p(torch.floor(lengths_T))
        cosines_TF = factors_T[:, None].repeat(1, self.dim // 2)
        return Rotation(cosines_TF, torch.zeros_like(cosines_TF), is_interleaved=False)


# Position-dependent inputs of the layers in a step, by layer configuration.
Rotations = Mapping[RotarySpec | TemperatureSpec, Rotation]


class Rotaries(nn.Module):
    """The rotations and temperatures of all layers of a model, on its device."""

    def __init__(
        self, configs: Iterable[RotarySpec | TemperatureSpec], device: torch.device, max_model_len: int
    ) -> None:
        super().__init__()
        self._of_config = {
            config: Rotary(config.within(max_model_len), device) if isinstance(config, RotarySpec) else config
            for config in configs
        }
        # Registered so that torch finds the learned factors of the frequencies.
        self.registered = nn.ModuleList(self._rotaries)

    @property
    def _rotaries(self) -> list[Rotary]:
        return [rotary for rotary in self._of_config.values() if isinstance(rotary, Rotary)]

    @property
    def learned_factors(self) -> list[nn.Parameter]:
        """The logarithms of learned factors: an [F] float32 tensor for each embedding that has learned factors."""
        factors = (rotary.log_factors_F for rotary in self._rotaries)
        return [log_factors_F for log_factors_F in factors if log_factors_F is not None]

    @property
    def frequencies(self) -> list[Tensor]:
        """The radians per position of each pair: for each embedding, [F] float32 with scaling, then without."""
        configs = [rotary.config for rotary in self._rotaries]
        return [each.frequencies() for config in configs for each in (config, replace(config, scaling=None))]

    def at(self, positions_T: Tensor) -> Rotations:
        return {config: rotary.at(positions_T) for config, rotary in self._of_config.items()}
