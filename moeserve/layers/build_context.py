"""The facts that all layers of one rank's model share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from moeserve.config.settings import QuantizationName
from moeserve.distributed.coordinator import GroupCoordinator
from moeserve.distributed.groups import Groups
from moeserve.ops.backend import Backend

MinBits: TypeAlias = Literal[4, 5, 6, 8]  # of a weight with quantization="int4"


@dataclass(frozen=True)
class BuildContext:
    """The backend, groups, dtype and device with which the layers of one rank are built."""

    backend: Backend
    groups: Groups
    dtype: torch.dtype
    device: torch.device
    quantization: QuantizationName | None = None
    has_float8_cache: bool = False  # of keys and values
    block_size: int = 16  # tokens of a block of the KV cache
    max_model_len: int = 0  # of requests, which chooses one of LongRoPE's scalings
    down_bits: MinBits = 4  # of down projections with quantization="int4"
    has_memory: bool = True  # False: parameters have shapes and dtypes only; see `allocate_parameters`
    on_host: BuildContext | None = None  # of routed experts that are on the host of a GPU; None: they are on the device

    @property
    def is_batch_invariant(self) -> bool:
        """True if operations compute the same bytes for a token in any batch."""
        return self.backend.is_batch_invariant

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """The dtype to which sums of chunks are rounded; None: sums are not in chunks (`GroupCoordinator`)."""
        return self.dtype if self.is_batch_invariant else None

    @property
    def tp(self) -> GroupCoordinator:
        """The ranks that share attention heads, dense networks and the vocabulary."""
        return self.groups.tp

    @property
    def of_experts(self) -> BuildContext:
        """The context of routed experts."""
        return self.on_host or self

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return memory for a weight that a checkpoint will fill, in the model's dtype unless another is given."""
        dtype = dtype or self.dtype
        if self.has_memory and self.quantization is None:
            memory = self.backend.allocate_weights(shape, dtype, self.device)
        elif self.has_memory:  # quantised weights replace this one, which is then freed: it must not share pages
            memory = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            memory = torch.empty(shape, dtype=dtype, device="meta")
        return nn.Parameter(memory, requires_grad=False)

    def of_layer(self, layer: int, num_layers: int) -> BuildContext:
        """Return the context of a layer. Errors of its down projection matter more in some layers than in others.

        They have 6 bits in the first and in the last eighth of the layers and in every third layer between, as in the
        Q4_K_M files of llama.cpp.
        """
        eighth = num_layers // 8
        is_sensitive = not eighth <= layer < num_layers - eighth or (layer - eighth) % 3 == 2
        return self._with(down_bits=6 if is_sensitive else 4)

    def without_memory(self) -> BuildContext:
        """Return a context for a model whose parameters have no memory yet."""
        return self._with(has_memory=False)

    def with_memory(self) -> BuildContext:
        """Return a context in which parameters get memory."""
        return self._with(has_memory=True)

    def _with(self, **changes: Any) -> BuildContext:
        on_host = None if self.on_host is None else dataclasses.replace(self.on_host, **changes)
        return dataclasses.replace(self, on_host=on_host, **changes)
