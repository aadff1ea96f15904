"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a paged cache of compressed keys and values.

A token leaves one latent vector and one rotated key in the cache, shared by all heads. A head's keys and values are
linear maps of the latent vector, and there are two ways to use them:

- *absorbed*: the map of the keys is applied to the query instead, and that of the values to the result. All heads then
  attend to the latent vectors themselves. Cheap where few rows attend: nothing is computed per position of the context.
- *expanded*: keys and values of all heads are computed for the whole context, and attended to as usual. Each row costs
  less, so many rows earn the expansion back.

The two differ in the last bits, so which one a token gets should not depend on its chunk. A backend that takes all rows
is given all of them absorbed; the reference in torch is given short chunks absorbed, and long ones are expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moeserve.distributed.coordinator import GroupCoordinator
from moeserve.distributed.mesh import share_of
from moeserve.layers.linear import Linear
from moeserve.layers.norm import RMSNorm
from moeserve.layers.rotary import Rotation
from moeserve.layers.weights import Weights
from moeserve.memory import new_empty
from moeserve.ops.dense_attention import attend_causally
from moeserve.ops.latent_attention import choose_latent_attention
from moeserve.step_inputs import ChunkSpan, StepInputs

# T tokens, D model width, N heads, K values of a head's key that do not turn, S that do, V values of a head,
# L latent size, P = L + S, R rows of one chunk, C positions of its context

NORM_EPSILON = 1e-6  # of the two norms in here, whatever the model's own is
MAX_EXPANDED_SIZE = 2**24  # elements of keys or values that are expanded at a time


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """The shape of one layer of latent attention."""

    num_heads: int
    query_rank: int | None  # size that queries are compressed to; None: they are not
    latent_size: int
    key_dim: int  # of each head, without the part that turns
    rotary_dim: int
    value_dim: int
    score_factor: float = 1.0  # see RotaryConfig
    has_bias: bool = False  # of the compressing projections and of the output

    def can_divide(self, num_ranks: int) -> bool:
        """Whether so many tp ranks can have the same number of heads."""
        return self.num_heads % num_ranks == 0

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.rotary_dim

    @property
    def cached_size(self) -> int:
        """Values of one token in the cache."""
        return self.latent_size + self.rotary_dim

    @property
    def max_absorbed_rows(self) -> int:
        """Rows of a chunk up to which absorbing takes fewer multiplications than expanding.

        Per head and position of the context, a row costs P + L absorbed and K + S + V expanded, to which the expansion
        itself adds L * (K + V) once.
        """
        more_per_row = self.cached_size + self.latent_size - self.query_dim - self.value_dim
        expansion = self.latent_size * (self.key_dim + self.value_dim)
        return expansion // more_per_row if more_per_row > 0 else 2**31


@dataclass(frozen=True)
class LatentCache:
    """Normalised latent vectors and rotated keys of one layer, block by block. [num_blocks, block_size, P]."""

    latents: Tensor

    def clear(self) -> None:
        self.latents.zero_()


class LatentAttention(nn.Module):
    """Each token attends to the tokens of its own request up to itself.

    Each tp rank has a share of the heads, and a share of the output's sum; the cache, which all heads read, is whole.
    """

    def __init__(
        self,
        config: LatentAttentionConfig,
        hidden_size: int,
        tp: GroupCoordinator,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            tp: the ranks that divide the heads among them; see `LatentAttentionConfig.can_divide`.
        """
        super().__init__()
        self.config = config
        self.dtype, self.device = dtype, device
        self.heads = share_of(config.num_heads, tp.rank_in_group, tp.world_size)
        self.num_heads = num_heads = int(self.heads.stop - self.heads.start)
        query_size = num_heads * config.query_dim
        cuts = [self.heads.start * config.query_dim]
        self.query: Linear | CompressedQuery
        if config.query_rank is None:
            self.query = Linear(hidden_size, query_size, least_bits=8, cuts=cuts, dtype=dtype, device=device)
        else:
            self.query = CompressedQuery(
                hidden_size,
                config.query_rank,
                query_size,
                has_bias=config.has_bias,
                cuts=cuts,
                dtype=dtype,
                device=device,
            )
        self.compress = Linear(
            hidden_size, config.cached_size, has_bias=config.has_bias, least_bits=8, dtype=dtype, device=device
        )
        self.latent_norm = RMSNorm(config.latent_size, NORM_EPSILON, dtype=dtype, device=device)
        self.head_maps = HeadMaps(config, num_heads, dtype=dtype, device=device)
        self.output = Linear(
            num_heads * config.value_dim,
            hidden_size,
            has_bias=config.has_bias and tp.rank_in_group == 0,  # added once: outputs are summed over the ranks
            cuts=[self.heads.start * config.value_dim],
            dtype=dtype,
            device=device,
        )
        self.scale = config.query_dim**-0.5 * config.score_factor
        self.backend = choose_latent_attention(device.type, scale=self.scale, latent_size=config.latent_size)
        self._attend = self._attend_absorbed if self.backend.takes_all_rows else self._attend_either_way

    @property
    def cache_bytes_per_token(self) -> int:
        return self.config.cached_size * self.dtype.itemsize

    def make_cache(self, num_blocks: int, block_size: int) -> LatentCache:
        shape = (num_blocks, block_size, self.config.cached_size)
        return LatentCache(torch.empty(shape, dtype=self.dtype, device=self.device))

    def forward(self, hidden_TD: Tensor, rotation: Rotation, cache: LatentCache, step: StepInputs) -> Tensor:
        config = self.config
        query = self.query(hidden_TD).unflatten(-1, (self.num_heads, -1))
        query_TNK, query_TNS = query.split([config.key_dim, config.rotary_dim], dim=-1)
        query_TNP = new_empty(query, *query.shape[:2], config.cached_size)
        rotation.apply(query_TNS, out_TNH=query_TNP[..., config.latent_size :])

        latent_TP = self.compress(hidden_TD)
        latent_TL, key_TS = latent_TP.split([config.latent_size, config.rotary_dim], dim=-1)
        self.latent_norm.in_place(latent_TL)
        rotation.apply(key_TS[:, None], out_TNH=key_TS[:, None])
        self.backend.write(latent_TP, cache.latents, step)

        attended_TNV = self._attend(query_TNK, query_TNP, cache, step)
        return self.output(attended_TNV.flatten(1))

    def _attend_absorbed(
        self,
        query_TNK: Tensor,
        query_TNP: Tensor,
        cache: LatentCache,
        step: StepInputs,
        max_rows: int | None = None,
    ) -> Tensor:
        """[T, N, V], with zeros in the rows of chunks that have more than `max_rows` rows.

        Args:
            query_TNP: the queries' part that turns at the end, turned; the rest is written here.
        """
        self.head_maps.absorb(query_TNK, out_TNL=query_TNP[..., : self.config.latent_size])
        return self.head_maps.project(self.backend.attend(query_TNP, cache.latents, step, max_rows))

    def _attend_either_way(self, query_TNK: Tensor, query_TNP: Tensor, cache: LatentCache, step: StepInputs) -> Tensor:
        """[T, N, V], each chunk in the way that takes fewer multiplications."""
        max_rows = self.config.max_absorbed_rows
        is_long = [min(span.num_rows, span.context_len) > max_rows for span in step.spans]
        attended_TNV = query_TNK.new_zeros(*query_TNK.shape[:2], self.config.value_dim)
        if not all(is_long):
            attended_TNV = self._attend_absorbed(query_TNK, query_TNP, cache, step, max_rows)
        for chunk, span in enumerate(step.spans):
            if is_long[chunk]:
                last_row = span.first_row + span.num_rows
                rows = slice(last_row - min(span.num_rows, span.context_len), last_row)  # those that have a position
                query_RNQ = torch.cat([query_TNK[rows], query_TNP[rows, :, self.config.latent_size :]], dim=-1)
                attended_TNV[rows] = self._attend_expanded(query_RNQ, cache, step.block_table[chunk], span)
        return attended_TNV

    def _attend_expanded(self, query_RNQ: Tensor, cache: LatentCache, block_ids: Tensor, span: ChunkSpan) -> Tensor:
        """[R, N, V] of one chunk, so many heads at a time that what is expanded stays small."""
        config = self.config
        cached_CP = self.backend.gather(cache.latents, block_ids, span.context_len)
        latent_CL, key_CS = cached_CP.split([config.latent_size, config.rotary_dim], dim=-1)
        size_per_head = span.context_len * max(config.query_dim, config.value_dim)
        heads_at_once = max(1, MAX_EXPANDED_SIZE // size_per_head)
        attended: list[Tensor] = []
        for first_head in range(0, self.num_heads, heads_at_once):
            heads = slice(first_head, first_head + heads_at_once)
            key_CnK, value_CnV = self.head_maps.expand(latent_CL, heads)
            key_CnQ = torch.cat([key_CnK, key_CS[:, None].expand(-1, key_CnK.shape[1], -1)], dim=-1)
            attended.append(
                attend_causally(
                    query_RNQ[:, heads], key_CnQ.transpose(0, 1), value_CnV.transpose(0, 1), scale=self.scale
                )
            )
        return torch.cat(attended, dim=1)


class HeadMaps(nn.Module):
    """What turns a latent vector into each head's key and value; or, absorbed, a query and a result instead."""

    def __init__(
        self, config: LatentAttentionConfig, num_heads: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        # Scores are exponents, so what goes into them keeps 8 bits; values are as few numbers. No kernel multiplies
        # blocks with an input of its own for each head.
        size, options = config.latent_size, dict[str, Any](least_bits=8, cuts=None, dtype=dtype, device=device)
        self.keys = Weights(num_heads, size, config.key_dim, **options)  # [N, L, K]
        self.values = Weights(num_heads, config.value_dim, size, **options)  # [N, V, L]

    def absorb(self, query_TNK: Tensor, out_TNL: Tensor) -> None:
        """Writes vectors whose products with latent vectors are those of the queries with the heads' keys."""
        self.keys.product.multiply_each(query_TNK, out_TNL)

    def project(self, attended_TNL: Tensor) -> Tensor:
        """[T, N, V]: the heads' values of sums of latent vectors."""
        return self.values.product.multiply_each(attended_TNL)

    def expand(self, latent_CL: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Some heads' keys [C, n, K] and values [C, n, V], while the weights are open."""
        key_nLK, value_nVL = self.keys.open.weight_eOI[heads], self.values.open.weight_eOI[heads]
        key_nCK = torch.matmul(latent_CL, key_nLK)
        value_nCV = torch.matmul(latent_CL, value_nVL.transpose(1, 2))
        return key_nCK.transpose(0, 1), value_nCV.transpose(0, 1)


class CompressedQuery(nn.Module):
    """Queries through a narrow layer: up(norm(down(x)))"""

    def __init__(
        self,
        hidden_size: int,
        rank: int,
        query_size: int,
        *,
        has_bias: bool,
        cuts: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            cuts: of the queries; see `Weights`.
        """
        super().__init__()
        self.down = Linear(hidden_size, rank, has_bias=has_bias, least_bits=8, dtype=dtype, device=device)
        self.norm = RMSNorm(rank, NORM_EPSILON, dtype=dtype, device=device)
        self.up = Linear(rank, query_size, least_bits=8, cuts=cuts, dtype=dtype, device=device)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return self.up(self.norm(self.down(hidden_TD)))
