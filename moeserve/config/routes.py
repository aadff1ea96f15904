"""`RouteShape`: the form in which the experts of each token are stored and sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RouteShape:
    """The shape of a token's routes: the experts that it chooses in each layer of the decoder.

    In memory and in messages, a token has a row [layers, top_k] of `dtype`. Layers without experts have zeros.
    """

    num_layers: int  # number of layers, without modules for multi-token prediction
    layers: tuple[int, ...]  # indices of the layers with experts
    top_k: int
    num_experts: int  # experts of a layer, including zero experts

    @property
    def dtype(self) -> Literal["uint8", "uint16"]:
        return "uint8" if self.num_experts <= 2**8 else "uint16"

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's row."""
        return self.num_layers * self.top_k * (1 if self.dtype == "uint8" else 2)
