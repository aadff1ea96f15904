"""The gated delta rule, token by token."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional

from moeserve.ops.gated_delta import L2_EPSILON, GatedDeltaCache, GatedDeltaShape, GatedDeltaWeights
from moeserve.step_inputs import StepInputs

# R tokens of a chunk, N value heads, G key heads, K values of a key, V of a value, C channels, W tokens of the
# convolution, w = W - 1


class TorchGatedDelta:
    """See `GatedDelta`."""

    def __init__(self, shape: GatedDeltaShape) -> None:
        self.shape = shape

    def __call__(
        self,
        input_TC: Tensor,
        gates_TX: Tensor,
        rates_T2N: Tensor,
        weights: GatedDeltaWeights,
        cache: GatedDeltaCache,
        step: StepInputs,
    ) -> Tensor:
        assert step.states is not None
        out_TX = torch.zeros(gates_TX.shape, dtype=input_TC.dtype, device=input_TC.device)
        moves = zip(*(rows.tolist() for rows in step.states), strict=True)
        for span, (load, store, save, num_before_save) in zip(step.spans, moves, strict=True):
            rows = slice(span.first_row, span.last_row + 1)
            inputs_wC = cache.inputs[load].clone() if load >= 0 else torch.zeros_like(cache.inputs[0])
            state_NKV = cache.states[load].clone() if load >= 0 else torch.zeros_like(cache.states[0])
            pieces = [rows]
            if save >= 0:
                middle = span.first_row + num_before_save
                pieces = [slice(rows.start, middle), slice(middle, rows.stop)]
            for number, piece in enumerate(pieces):
                if piece.start < piece.stop:
                    joined = torch.cat([inputs_wC, input_TC[piece]])
                    rates_R2N = rates_T2N[piece].float()
                    out_TX[piece], state_NKV = self._chunk(joined, gates_TX[piece], rates_R2N, weights, state_NKV)
                    inputs_wC = joined[len(joined) - len(inputs_wC) :]
                row = save if number < len(pieces) - 1 else store
                if row >= 0:
                    cache.inputs[row], cache.states[row] = inputs_wC, state_NKV
        return out_TX

    def _chunk(
        self, joined: Tensor, gates_RX: Tensor, rates_R2N: Tensor, weights: GatedDeltaWeights, state_NKV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of some tokens, and the state after them.

        Args:
            joined: [w + R, C], the inputs of the w tokens before them, and theirs.
        """
        shape, num_tokens = self.shape, len(gates_RX)
        mixed_RC = functional.conv1d(joined.float().T[None], weights.taps_WC.T[:, None], groups=joined.shape[1])[0].T
        key_size = shape.num_key_heads * shape.key_dim
        parts = functional.silu(mixed_RC).split([key_size, key_size, shape.num_heads * shape.value_dim], dim=1)
        per_key = shape.num_heads // shape.num_key_heads
        query_RNK, key_RNK = (
            repeat(_normalized(part.unflatten(1, (shape.num_key_heads, -1))), "R G K -> R (G n) K", n=per_key)
            for part in parts[:2]
        )
        value_RNV = parts[2].unflatten(1, (shape.num_heads, -1))
        rate_RN = rates_R2N[:, : shape.num_heads].sigmoid()
        step_RN = functional.softplus(rates_R2N[:, shape.num_heads :] + weights.decay_bias_N)
        decay_RN = (-weights.log_decay_N.exp() * step_RN).exp()
        out_RNV = torch.empty_like(value_RNV)
        for t in range(num_tokens):
            state_NKV = state_NKV * decay_RN[t, :, None, None]
            known_NV = torch.einsum("NKV, NK -> NV", state_NKV, key_RNK[t])
            change_NV = (value_RNV[t] - known_NV) * rate_RN[t, :, None]
            state_NKV = state_NKV + key_RNK[t][:, :, None] * change_NV[:, None]
            out_RNV[t] = torch.einsum("NKV, NK -> NV", state_NKV, query_RNK[t]) * shape.key_dim**-0.5
        gate_RNV = gates_RX.float().unflatten(1, (shape.num_heads, -1))
        scale_RN1 = (out_RNV.square().mean(dim=-1, keepdim=True) + shape.norm_epsilon).rsqrt()
        gated_RNV = out_RNV * scale_RN1 * weights.norm_V * functional.silu(gate_RNV)
        return rearrange(gated_RNV, "R N V -> R (N V)").to(joined.dtype), state_NKV


def _normalized(heads_RGK: Tensor) -> Tensor:
    return heads_RGK * (heads_RGK.square().sum(dim=-1, keepdim=True) + L2_EPSILON).rsqrt()
