"""Linear attention with a state for each request, as an operation: its shapes, weights and protocol.

Each value head of a request has a state S [K, V]. A token has a query q, a key k, a value v and a decay a, which is one
number in (0, 1] or one for each channel of the key. The update of the state and the output are:

    delta rule (gated delta networks, arXiv 2412.06464; Kimi delta attention, arXiv 2510.26692)
        S <- a S
        S <- S + k (b (v - S^T k))^T
        o  = S^T q / sqrt(K)

    state space model (Mamba-2, arXiv 2405.21060)
        S <- a S + k (d v)^T
        o  = S^T q + skip v

The delta rule normalises q and k to unit length, and b in (0, 1) is its rate. d is the step size, from which a is
computed too. Queries, keys and values are outputs of a short convolution. Outputs are normalised and multiplied by the
activation of a gate: before the norm in a state space model, after it with the delta rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from moeserve.step_inputs import StepInputs

# N value heads, G key heads, K values of a key, X = N * V, C = 2 * G * K + N * V channels: queries, keys, values

L2_EPSILON = 1e-6  # added to the sum of squares of a query or key
MAX_HEAD = 256  # maximum key and value size that the kernels support


@dataclass(frozen=True, kw_only=True)
class LinearAttentionShape:
    """One layer's heads on one rank. Value head n reads key head n // (num_heads / num_key_heads)."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    is_delta: bool
    norm_epsilon: float
    has_channel_decays: bool = False  # each channel of a key has its own decay; only with the delta rule
    # With a floor f < 0, a = exp(f * sigmoid(exp(log_decay) * (x + bias))); otherwise a = exp(-exp(log_decay) * d) with
    # the step size d = softplus(x + bias).
    decay_floor: float | None = None
    gate: Literal["silu", "sigmoid"] = "silu"

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def num_decays(self) -> int:
        return self.num_heads * (self.key_dim if self.has_channel_decays else 1)

    @property
    def norm_heads(self) -> int:
        """Number of heads normalised together: 1 with the delta rule, otherwise all heads that read one key head."""
        return 1 if self.is_delta else self.num_heads // self.num_key_heads


@dataclass(frozen=True)
class LinearAttentionWeights:
    """The weights of a layer except its projections and its convolution, all float32."""

    log_decay_N: Tensor
    decay_bias: Tensor  # [N], or [N * K] for decays of each channel
    norm: Tensor  # [V] for all heads, or [X] in a state space model
    skip_N: Tensor | None = None  # only in a state space model


class LinearAttention(Protocol):
    """The recurrence of one layer, between its convolution and its output projection: updates and reads the states."""

    def __call__(
        self,
        mixed_TC: Tensor,
        gates_TX: Tensor,
        decays_TX: Tensor,
        rates_TN: Tensor | None,
        weights: LinearAttentionWeights,
        states: Tensor,
        step: StepInputs,
        /,
    ) -> Tensor:
        """Return the gated outputs [T, X] in the dtype of the gates, and update the states.

        Output rows outside all chunks, and of chunks that store no state, have arbitrary finite values.

        Args:
            mixed_TC: float32, contiguous: queries, keys and values.
            gates_TX: this argument and the next two may be views of a wider projection.
            decays_TX: the inputs x of the decays, [T, N] or, with decays of each channel, [T, N * K].
            rates_TN: the logits of the rates b; None in a state space model.
            states: [rows, N, K, V] float32; see `StateRows`.
        """
        ...
