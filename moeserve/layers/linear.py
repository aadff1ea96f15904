"""Matrix products with weights that stay put: projections, the token embedding, and the output head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeserve.ops.linear import choose_linear


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Memory for a weight that a checkpoint will fill."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


# T tokens, I values in, O values out, V vocabulary, D model width


class Linear(nn.Module):
    """`output_TO = input_TI @ weight_OI.T + bias_O`"""

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        has_bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = parameter(num_outputs, num_inputs, dtype=dtype, device=device)
        self.bias = parameter(num_outputs, dtype=dtype, device=device) if has_bias else None
        self.linear = choose_linear(device.type)

    def forward(self, input_TI: Tensor) -> Tensor:
        return self.linear(input_TI, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of a table, one for each token id."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        return functional.embedding(token_ids_T, self.weight)


class OutputHead(nn.Module):
    """Logits of every token of the vocabulary. With tied embeddings its weight is the embedding's own."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: Embedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = tied_to.weight if tied_to else parameter(vocab_size, hidden_size, dtype=dtype, device=device)
        self.linear = choose_linear(device.type)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return self.linear(hidden_TD, self.weight)
