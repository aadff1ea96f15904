"""Linear attention with Triton kernels."""

from __future__ import annotations

from torch import Tensor

from moeserve.ops.linear_attention.interface import LinearAttentionShape, LinearAttentionWeights
from moeserve.step_inputs import StepInputs
from moeserve.triton_kernels.linear_attention import linear_attention

# N value heads, X = N * V, C channels


class TritonLinearAttention:
    """A `LinearAttention` in Triton."""

    def __init__(self, shape: LinearAttentionShape, *, uses_tiles: bool = True) -> None:
        """
        Args:
            uses_tiles: use tiles for chunks of many tokens. If False, the order of all sums is fixed.
        """
        self._shape = shape
        self._uses_tiles = uses_tiles

    def __call__(
        self,
        mixed_TC: Tensor,
        gates_TX: Tensor,
        decays_TX: Tensor,
        rates_TN: Tensor | None,
        weights: LinearAttentionWeights,
        states: Tensor,
        step: StepInputs,
    ) -> Tensor:
        assert step.states is not None
        shape = self._shape
        return linear_attention(
            mixed_TC,
            gates_TX,
            decays_TX,
            rates_TN,
            weights.log_decay_N,
            weights.decay_bias,
            weights.skip_N,
            weights.norm,
            states,
            step.row_starts,
            step.context_lens,
            step.states,
            lengths=[span.num_rows for span in step.spans],
            uses_tiles=self._uses_tiles,
            norm_heads=shape.norm_heads,
            norm_epsilon=shape.norm_epsilon,
            decay_floor=shape.decay_floor,
            gates_with_sigmoid=shape.gate == "sigmoid",
        )
