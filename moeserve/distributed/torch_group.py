"""Process groups of torch.distributed for libraries that need one."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.distributed import Store


def as_torch_group(store: Store, rank_in_group: int, num_ranks: int, backend: Any) -> Any:
    """Return a ProcessGroup of torch.distributed over a backend made by `nccl.make_process_group`.

    The group is in no global table. The backend is registered as the default backend, because a barrier puts its
    tensors on the device of the default backend. Without a default backend, these tensors would be on the CPU, which
    NCCL does not support.
    """
    c10d = importlib.import_module("torch._C._distributed_c10d")
    group = c10d.ProcessGroup(store, rank_in_group, num_ranks)
    backend_type = getattr(c10d.ProcessGroup.BackendType, backend.name().upper())
    device = torch.device("cuda" if backend.name() == "nccl" else "cpu")
    group._set_default_backend(backend_type)
    group._register_backend(device, backend_type, backend)
    return group
