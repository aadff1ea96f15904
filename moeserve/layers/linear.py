"""Matrix products with weights that stay put: projections, the token embedding, and the output head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeserve.distributed.coordinator import GroupCoordinator
from moeserve.distributed.mesh import share_of, share_sizes
from moeserve.layers.weights import Weights, parameter

# T tokens, I values in, O values out, V vocabulary, D model width


class Linear(nn.Module):
    """`output_TO = input_TI @ weight_OI.T + bias_O`"""

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        has_bias: bool = False,
        least_bits: Literal[4, 8] = 4,
        cuts: Sequence[int] = (),
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            least_bits: of a weight that is quantised.
            cuts: see `Weights`.
        """
        super().__init__()
        self.weights = Weights(
            1, num_outputs, num_inputs, has_bias=has_bias, least_bits=least_bits, cuts=cuts, dtype=dtype, device=device
        )

    @property
    def weight(self) -> Tensor:
        """[O, I], until it is packed."""
        return self.weights.open.weight_eOI[0]

    @property
    def bias(self) -> Tensor | None:
        return None if self.weights.bias is None else self.weights.bias[0]

    def forward(self, input_TI: Tensor) -> Tensor:
        return self.weights.product.multiply(input_TI)


class Embedding(nn.Module):
    """Rows of a table, one for each token id. Each tp rank has a share of the vocabulary."""

    def __init__(
        self, vocab_size: int, hidden_size: int, tp: GroupCoordinator, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.tp = tp
        self.share = share_of(vocab_size, tp.rank_in_group, tp.world_size)
        num_rows = self.share.stop - self.share.start
        self.weight = parameter(num_rows, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids_T: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's share [t, D] of the tokens' rows; `sizes` are the shares of all tp ranks."""
        if self.tp.world_size == 1:
            return functional.embedding(token_ids_T, self.weight)
        is_elsewhere_T = (token_ids_T < self.share.start) | (token_ids_T >= self.share.stop)
        rows_T = (token_ids_T - self.share.start).masked_fill(is_elsewhere_T, 0)
        hidden_TD = functional.embedding(rows_T, self.weight).masked_fill(is_elsewhere_T[:, None], 0.0)
        return self.tp.reduce_scatter(hidden_TD, sizes)  # collective: all tp ranks


class OutputHead(nn.Module):
    """Logits of every token of the vocabulary. With tied embeddings its weight is the embedding's own."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp: GroupCoordinator,
        *,
        tied_to: Embedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.share_sizes = share_sizes(vocab_size, tp.world_size)
        self.share = share_of(vocab_size, tp.rank_in_group, tp.world_size)
        num_rows = self.share_sizes[tp.rank_in_group]
        # Read once for each token, and what it says is the token: 8 bits are the least, and those of floats too few.
        self.weights = Weights(
            1,
            num_rows,
            hidden_size,
            least_bits=8,
            cuts=None,
            borrowed=tied_to.weight[None] if tied_to else None,
            dtype=dtype,
            device=device,
        )

    @property
    def weight(self) -> Tensor:
        """[v, D], until it is packed; v is this rank's share of the vocabulary."""
        return self.weights.open.weight_eOI[0]

    def forward(self, hidden_LD: Tensor) -> Tensor:
        """[L, vocab_size], on every tp rank. Rows are contiguous: what chooses tokens from them may rely on it."""
        logits_LV = self.weights.product.multiply(hidden_LD)
        if self.tp.world_size == 1:
            return logits_LV
        num_rows = len(logits_LV)
        sizes = [num_rows * share for share in self.share_sizes]
        # collective: all tp ranks
        parts = self.tp.all_gather(logits_LV.flatten(), sizes).split(sizes)
        shares_LV = [part.view(num_rows, share) for part, share in zip(parts, self.share_sizes, strict=True)]
        return torch.cat(shares_LV, dim=1)
