"""Lightning attention with a state for each request."""

from __future__ import annotations

import torch

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.lightning_attention.cpu import CpuLightningAttention
from moeserve.ops.lightning_attention.reference import LightningAttention, TorchLightningAttention


def make(backend: Backend, dtype: torch.dtype) -> LightningAttention:
    """Return the attention of a layer, whose outputs have the dtype `dtype`."""
    return choose(TABLE, backend, dtype)


TABLE: dict[str, Implementation[torch.dtype, LightningAttention]] = {
    "cpu": Implementation(lambda backend, dtype: CpuLightningAttention(backend.native, dtype)),
    "reference": Implementation(lambda backend, dtype: TorchLightningAttention(dtype)),
}
