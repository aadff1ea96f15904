"""The memory of a GPU with `expert_device="cpu"` and `num_cpu_layers`."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.machine import shown_bytes
from moeserve.models.expert_store.budget import ROUTED_EXPERTS
from moeserve.models.summary import Part


def host_outlook(
    parts: Sequence[Part], num_layers: int, num_sparse_layers: int, gpu_bytes: int | None = None
) -> str | None:
    """Return which layers' experts a GPU leaves to its host; None if there are none, or no number of layers helps.

    Args:
        parts: of the whole model.
        num_sparse_layers: layers with experts, the last ones of `num_layers`.
        gpu_bytes: memory of a GPU for weights; None: any, so that the text has the sizes to choose by.
    """
    all_bytes = sum(part.num_bytes for part in parts if part.name == ROUTED_EXPERTS)
    other_bytes = sum(part.num_bytes for part in parts) - all_bytes
    if not all_bytes:
        return None
    of_layer = all_bytes // num_sparse_layers
    if gpu_bytes is None:
        return (
            f"{shown_bytes(other_bytes)} are on the GPU with --expert-device cpu; with --num-cpu-layers N also "
            f"{shown_bytes(of_layer)} for each layer with experts behind the first N"
        )
    if gpu_bytes < other_bytes:
        return None
    num_on_host = num_sparse_layers - min(num_sparse_layers, (gpu_bytes - other_bytes) // of_layer)
    return (
        f"one GPU with expert_device='cpu' and num_cpu_layers={num_layers - num_sparse_layers + num_on_host} leaves "
        f"{shown_bytes(num_on_host * of_layer)} of experts to the host"
    )
