"""The gated delta rule (arXiv 2412.06464) as an operation: its shapes, weights and state, and the protocol.

For each value head, with the state S [K, V] of a request, a token's normalised query q and key k, its value v, its
decay a in (0, 1] and its rate b in (0, 1):

    S <- a S
    S <- S + k (b (v - S^T k))^T
    o  = S^T q / sqrt(K)

Queries, keys and values come out of a causal convolution over the last few tokens, for each channel by itself, and a
SiLU. Outputs are normalised for each head and multiplied by the SiLU of a gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moeserve.step_inputs import StepInputs

# T tokens, N value heads, G key heads, K values of a key, V of a value, C = 2 * G * K + N * V channels: queries, keys,
# values; W tokens of the convolution, its own included; w = W - 1

L2_EPSILON = 1e-6  # added to the sum of squares of a query or key


@dataclass(frozen=True, kw_only=True)
class GatedDeltaShape:
    """One layer's part on one rank. Value head n reads key head n // (num_heads / num_key_heads)."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    num_taps: int  # of the convolution: W
    norm_epsilon: float

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim


@dataclass(frozen=True)
class GatedDeltaWeights:
    """The weights of a layer except its projections, all float32."""

    taps_WC: Tensor  # the last one multiplies the token itself
    log_decay_N: Tensor  # a = exp(-exp(log_decay) * softplus(x + decay_bias))
    decay_bias_N: Tensor
    norm_V: Tensor


@dataclass(frozen=True)
class GatedDeltaCache:
    """The states of one layer, a row for each running request and each saved state; see `StateRows`."""

    inputs: Tensor  # [rows, w, C] in the model's dtype: the last inputs of the convolution, the oldest first
    states: Tensor  # [rows, N, K, V] float32

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the cache; their first dimension is the row."""
        return self.inputs, self.states

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()


class GatedDelta(Protocol):
    """The part of a layer between its projections."""

    def __call__(
        self,
        input_TC: Tensor,
        gates_TX: Tensor,
        rates_T2N: Tensor,
        weights: GatedDeltaWeights,
        cache: GatedDeltaCache,
        step: StepInputs,
        /,
    ) -> Tensor:
        """Return the gated outputs [T, N * V] in the dtype of the inputs, and update the states.

        Output rows outside of all chunks, and of chunks that store no state, have arbitrary finite values.

        Args:
            input_TC: may be a view of a wider projection.
            gates_TX: [T, N * V]; may be a view.
            rates_T2N: for each head the number whose sigmoid is b, then for each head the number x of the decay.
        """
        ...
