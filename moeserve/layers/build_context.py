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

MinBits: TypeAlias = Literal[4, 5, 6, 8]  # minimum number of bits of a weight with quantization="int4"


@dataclass(frozen=True)
class BuildContext:
    """The backend, groups, dtype and device with which the layers of one rank are built."""

    backend: Backend
    groups: Groups
    dtype: torch.dtype
    device: torch.device
    quantization: QuantizationName | None = None
    has_float8_cache: bool = False  # keys and values are cached as 8-bit floats
    block_size: int = 16  # number of tokens in a block of the KV cache
    max_model_len: int = 0  # maximum number of tokens of a request; chooses one of LongRoPE's scalings
    down_bits: MinBits = 4  # minimum number of bits of down projections with quantization="int4"
    has_memory: bool = True  # False: parameters have shapes and dtypes only; see `allocate_parameters`
    on_host: BuildContext | None = None  # context of routed experts on the host of a GPU; None: they are on the device
    num_host_layers: int | None = None  # number of the first layers, whose experts have `on_host`; None: all layers

    @property
    def is_batch_invariant(self) -> bool:
        """True if operations compute the same bytes for a token in any batch."""
        return self.backend.is_batch_invariant

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """The dtype to which `reduce_scatter` rounds sums over tp ranks; None: products are not added in chunks."""
        return self.dtype if self.is_batch_invariant else None

    @property
    def tp(self) -> GroupCoordinator:
        """The group of ranks that divide attention heads, dense networks and the vocabulary among them."""
        return self.groups.tp

    @property
    def of_experts(self) -> BuildContext:
        """The context with which routed experts are built."""
        return self.on_host or self

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return a parameter of shape `shape` that a checkpoint will fill. `dtype` None: the model's dtype."""
        dtype = dtype or self.dtype
        if self.has_memory and self.quantization is None:
            memory = self.backend.allocate_weights(shape, dtype, self.device)
        elif self.has_memory:  # freed when quantised weights replace it, so it must not share pages
            memory = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            memory = torch.empty(shape, dtype=dtype, device="meta")
        return nn.Parameter(memory, requires_grad=False)

    def of_layer(self, layer: int, num_layers: int) -> BuildContext:
        """Return the context of one layer: the bits of its down projections, and `on_host` if its experts are there.

        With quantization="int4", down projections have 6 bits in the first and the last eighth of the layers and in
        every third layer between, where errors matter more, and 4 bits elsewhere, as in llama.cpp's Q4_K_M files.
        """
        eighth = num_layers // 8
        is_sensitive = not eighth <= layer < num_layers - eighth or (layer - eighth) % 3 == 2
        context = self._with(down_bits=6 if is_sensitive else 4)
        is_on_device = self.num_host_layers is not None and layer >= self.num_host_layers
        return dataclasses.replace(context, on_host=None) if is_on_device else context

    def without_memory(self) -> BuildContext:
        """Return a context for a model whose parameters have no memory yet."""
        return self._with(has_memory=False)

    def with_memory(self) -> BuildContext:
        """Return a context in which parameters get memory."""
        return self._with(has_memory=True)

    def _with(self, **changes: Any) -> BuildContext:
        on_host = None if self.on_host is None else dataclasses.replace(self.on_host, **changes)
        return dataclasses.replace(self, on_host=on_host, **changes)
