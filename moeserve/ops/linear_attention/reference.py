"""Linear attention in plain torch, computed token by token."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional

from moeserve.ops.linear_attention.interface import L2_EPSILON, LinearAttentionShape, LinearAttentionWeights
from moeserve.ops.state_pieces import run_pieces
from moeserve.step_inputs import StepInputs

# N value heads, G key heads, K values of a key, X = N * V, C channels


class TorchLinearAttention:
    """A `LinearAttention` in plain torch."""

    def __init__(self, shape: LinearAttentionShape) -> None:
        self.shape = shape

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
        out_TX = torch.zeros(gates_TX.shape, dtype=gates_TX.dtype, device=gates_TX.device)

        def run(rows: slice, state_NKV: Tensor) -> Tensor:
            inputs = decays_TX[rows].float() + weights.decay_bias
            rates_RN = None if rates_TN is None else rates_TN[rows].float()
            out_RX, state_NKV = self._chunk(mixed_TC[rows], inputs, rates_RN, weights, state_NKV)
            out_TX[rows] = self._gated(out_RX, gates_TX[rows].float(), weights.norm).to(out_TX.dtype)
            return state_NKV

        run_pieces(step, states, run)
        return out_TX

    def _chunk(
        self,
        mixed_RC: Tensor,
        inputs: Tensor,
        rates_RN: Tensor | None,
        weights: LinearAttentionWeights,
        state_NKV: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs [R, X] of some tokens before their norm, and the state after them.

        Args:
            inputs: the inputs x of the decays after adding the bias, [R, N] or [R, N * K].
        """
        shape, is_delta = self.shape, self.shape.is_delta
        key_size, per_key = shape.num_key_heads * shape.key_dim, shape.num_heads // shape.num_key_heads
        parts = mixed_RC.split([key_size, key_size, shape.num_heads * shape.value_dim], dim=1)
        heads = [part.unflatten(1, (shape.num_key_heads, -1)) for part in parts[:2]]
        query_RNK, key_RNK = (
            repeat(_normalized(part) if is_delta else part, "R G K -> R (G n) K", n=per_key) for part in heads
        )
        value_RNV = parts[2].unflatten(1, (shape.num_heads, -1))
        inputs_RNk = inputs.unflatten(1, (shape.num_heads, -1))  # k is 1 or K
        growth_N1 = weights.log_decay_N.exp()[:, None]
        step_RNk = functional.softplus(inputs_RNk)
        if shape.decay_floor is None:
            decay_RNk = (-growth_N1 * step_RNk).exp()
        else:
            decay_RNk = (shape.decay_floor * (growth_N1 * inputs_RNk).sigmoid()).exp()
        rate_RN1 = step_RNk if rates_RN is None else rates_RN.sigmoid()[..., None]
        scale = shape.key_dim**-0.5 if is_delta else 1.0
        out_RNV = torch.empty_like(value_RNV)
        for t in range(len(mixed_RC)):
            state_NKV = state_NKV * decay_RNk[t][..., None]
            change_NV = value_RNV[t]
            if is_delta:
                change_NV = change_NV - torch.einsum("NKV, NK -> NV", state_NKV, key_RNK[t])
            state_NKV = state_NKV + key_RNK[t][:, :, None] * (change_NV * rate_RN1[t])[:, None]
            out_RNV[t] = torch.einsum("NKV, NK -> NV", state_NKV, query_RNK[t]) * scale
        if weights.skip_N is not None:
            out_RNV += value_RNV * weights.skip_N[:, None]
        return rearrange(out_RNV, "R N V -> R (N V)"), state_NKV

    def _gated(self, out_RX: Tensor, gates_RX: Tensor, norm: Tensor) -> Tensor:
        """Return the outputs [R, X] after norm and gate. The norm comes first with the delta rule, else the gate."""
        shape = self.shape
        gate_RX = functional.silu(gates_RX) if shape.gate == "silu" else gates_RX.sigmoid()
        if not shape.is_delta:
            out_RX = out_RX * gate_RX
        groups = out_RX.unflatten(1, (-1, shape.norm_heads * shape.value_dim))
        groups = groups * (groups.square().mean(dim=-1, keepdim=True) + shape.norm_epsilon).rsqrt()
        normed_RX = groups.flatten(1) * norm.repeat(out_RX.shape[1] // len(norm))
        return normed_RX * gate_RX if shape.is_delta else normed_RX


def _normalized(heads_RGK: Tensor) -> Tensor:
    return heads_RGK * (heads_RGK.square().sum(dim=-1, keepdim=True) + L2_EPSILON).rsqrt()
