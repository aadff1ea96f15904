"""The facts that all layers of one rank's model share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from moeserve.distributed.coordinator import GroupCoordinator
from moeserve.distributed.groups import Groups
from moeserve.ops.interfaces import Kernels


@dataclass(frozen=True)
class ModelContext:
    """The kernels, groups, dtype and device with which the layers of one rank are built."""

    kernels: Kernels
    groups: Groups
    dtype: torch.dtype
    device: torch.device

    @property
    def tp(self) -> GroupCoordinator:
        """The ranks that share attention heads, dense networks and the vocabulary."""
        return self.groups.tp

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return memory for a weight that a checkpoint will fill, in the model's dtype unless another is given."""
        memory = self.kernels.allocate_weights(shape, dtype or self.dtype, self.device)
        return nn.Parameter(memory, requires_grad=False)
