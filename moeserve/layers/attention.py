"""Grouped-query attention over a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeserve.layers.linear import Linear
from moeserve.layers.rotary import Rotation
from moeserve.ops.attention import choose_attention
from moeserve.step_inputs import StepInputs

# T tokens, D model width, N query heads, G key-value heads, H head size


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of one layer, block by block. [num_blocks, G, block_size, H] each."""

    keys: Tensor
    values: Tensor

    def clear(self) -> None:
        self.keys.zero_()
        self.values.zero_()


class Attention(nn.Module):
    """Each token attends to the tokens of its own request up to itself, or to the last `window` of them."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.projected_sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        self.query_key_value = Linear(hidden_size, sum(self.projected_sizes), dtype=dtype, device=device)
        self.output = Linear(num_heads * head_dim, hidden_size, dtype=dtype, device=device)
        self.backend = choose_attention(device.type, scale=head_dim**-0.5, window=window)

    @property
    def cache_bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.output.weight.element_size()

    def make_cache(self, num_blocks: int, block_size: int) -> KeyValueCache:
        shape = (num_blocks, self.num_kv_heads, block_size, self.head_dim)
        return KeyValueCache(self.output.weight.new_empty(shape), self.output.weight.new_empty(shape))

    def forward(self, hidden_TD: Tensor, rotation: Rotation, cache: KeyValueCache, step: StepInputs) -> Tensor:
        query, key, value = self.query_key_value(hidden_TD).split(self.projected_sizes, dim=-1)
        query_TNH = rotation.apply(query.unflatten(-1, (-1, self.head_dim)))
        key_TGH = rotation.apply(key.unflatten(-1, (-1, self.head_dim)))
        value_TGH = value.unflatten(-1, (-1, self.head_dim))
        self.backend.write(key_TGH, value_TGH, cache.keys, cache.values, step)
        attended_TNH = self.backend.attend(query_TNH, cache.keys, cache.values, step)
        return self.output(attended_TNH.flatten(1))
