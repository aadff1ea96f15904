"""The memory of a GPU with `expert_device="cpu"` and `num_cpu_layers`."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.machine import shown_bytes
from moeserve.models.expert_store.budget import AUTO_SHARE, ROUTED_EXPERTS
from moeserve.models.summary import Part


def host_outlook(parts: Sequence[Part], sparse_layers: Sequence[int], gpu_bytes: int | None = None) -> str | None:
    """Return which layers' experts a GPU leaves to its host; None if there are none, or no number of layers helps.

    Args:
        parts: of the whole model.
        sparse_layers: numbers of the layers with experts, ascending.
        gpu_bytes: memory of a GPU, of which weights leave AUTO_SHARE to the KV cache and steps; None: any, so that the
            text has the sizes to choose by.
    """
    all_bytes = sum(part.num_bytes for part in parts if part.name == ROUTED_EXPERTS)
    other_bytes = sum(part.num_bytes for part in parts) - all_bytes
    if not all_bytes:
        return None
    of_layer = all_bytes // len(sparse_layers)
    if gpu_bytes is None:
        return (
            f"{shown_bytes(other_bytes)} are on the GPU with --expert-device cpu; with --num-cpu-layers N also "
            f"{shown_bytes(of_layer)} for each layer with experts after the first N"
        )
    left = int(gpu_bytes * (1 - AUTO_SHARE)) - other_bytes
    num_on_host = len(sparse_layers) - min(len(sparse_layers), left // of_layer)
    if left < 0 or num_on_host == 0:
        return None
    return (
        f"one GPU with expert_device='cpu' and num_cpu_layers={sparse_layers[num_on_host - 1] + 1} leaves "
        f"{shown_bytes(num_on_host * of_layer)} of experts to the host"
    )
