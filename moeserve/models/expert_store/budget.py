"""The memory for experts that are read from disk: how many experts of each layer are in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moeserve.config.resolve_schedule import TOKENS_WITH_EXPERTS_ON_DISK
from moeserve.errors import SettingsError
from moeserve.layers.moe.layer import MoELayer
from moeserve.machine import shown_bytes
from moeserve.models.checkpoint.packed_cache import PAGE_BYTES
from moeserve.models.decoder import Decoder
from moeserve.models.expert_store.served import least_free
from moeserve.models.summary import Part, loading_memory

ROUNDING = 1e-6  # added before rounding down, so that a quarter of 128 experts is 32 despite float errors
AUTO_SHARE = 0.15  # share of free memory that "auto" leaves for steps, the KV cache and the program

ROUTED_EXPERTS = "routed experts"  # the part of a model that may be on disk
ASSUMED_DISK_RATE = 2e9  # bytes per second: a typical SSD on PCIe


@dataclass(frozen=True)
class ExpertSizes:
    """The number of experts of one layer on this rank, and their size."""

    num_experts: int
    slot_bytes: int  # bytes of one expert: its packed weights, in whole pages


@dataclass(frozen=True)
class Budget:
    """The number of experts of each layer that are in memory at a time, by the name of the layer."""

    slots: Mapping[str, int]
    num_bytes: int  # bytes of the experts in memory
    stored_bytes: int  # bytes of all experts
    least_slots: int  # experts of each layer that stay in memory when it is scarce: in all, a token's in two layers


def moe_layers(model: Decoder) -> dict[str, MoELayer]:
    """Return the layers of a model that have experts on this rank, by module name, in the order in which they run.

    With some layers' experts on the host of a GPU, these layers alone.
    """
    backend = model.context.of_experts.backend
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MoELayer)
        and module.experts.gate_up.shape[0] > 0
        and module.experts.gate_up.context.backend is backend
    }


def expert_sizes(layers: Mapping[str, MoELayer]) -> dict[str, ExpertSizes]:
    """Return the sizes of the experts of each of `moe_layers`. Weights may be without memory."""
    sizes = {}
    for name, layer in layers.items():
        each = [weights.num_packed_bytes // weights.shape[0] for weights in (layer.experts.gate_up, layer.experts.down)]
        # An expert that does not fill whole pages may touch one page more, depending on where it begins.
        slot_bytes = sum(
            -(-size // PAGE_BYTES) * PAGE_BYTES + (PAGE_BYTES if size % PAGE_BYTES else 0) for size in each
        )
        sizes[name] = ExpertSizes(layer.experts.gate_up.shape[0], slot_bytes)
    return sizes


def choose_budget(
    model: Decoder, wanted: int | float | Literal["auto"], free: int, kv_cache_memory: int | None
) -> Budget | None:
    """Return the budget for a model without memory; None if all experts fit, so no expert is read from disk.

    Experts that do not fit are marked by `Weights.is_on_disk`.

    Args:
        wanted: bytes for this rank's experts, or a share of the bytes of all its experts, or "auto": as much as fits.
        free: bytes that this rank may allocate on the device of its experts.
        kv_cache_memory: bytes for the KV cache on this device; None: "auto" leaves only its share of the free memory.

    Raises:
        SettingsError: the memory is too small for one expert of each layer, or more than is left.
    """
    layers = moe_layers(model)
    sizes = expert_sizes(layers)
    all_bytes = sum(size.num_experts * size.slot_bytes for size in sizes.values())
    _put_on_disk(layers, is_on_disk=True)
    left = free - loading_memory(model, device=model.context.of_experts.device).kept
    if wanted == "auto":
        num_bytes = left - int(free * AUTO_SHARE) - (kv_cache_memory or 0)
    else:
        num_bytes = wanted if isinstance(wanted, int) else int(wanted * all_bytes)
    if num_bytes >= all_bytes:
        _put_on_disk(layers, is_on_disk=False)
        return None
    # Memory that is at once below `least_free` would shrink at once. A KV cache without a size takes half of the rest.
    spare = least_free(num_bytes) * (2 if kv_cache_memory is None else 1) + (kv_cache_memory or 0)
    if wanted != "auto" and num_bytes > left - spare:
        raise SettingsError(
            f"expert_memory={wanted} does not fit in memory: these are {shown_bytes(num_bytes)}, but "
            f"{shown_bytes(max(0, left))} are free beside the other weights, of which {shown_bytes(spare)} must stay "
            "free or are for the KV cache; set it to less, or to 'auto'"
        )
    for name, layer in layers.items():
        if not (layer.experts.gate_up.packs and layer.experts.down.packs):
            raise SettingsError(
                f"expert_memory={wanted} needs C++ kernels for the experts of {name}: use dtype='bfloat16' or "
                "'float32' on a CPU, and install moeserve with a C++ compiler"
            )
    least = sum(size.slot_bytes for size in sizes.values())
    if num_bytes < least:
        raise SettingsError(
            f"expert_memory={wanted} is too small: one expert of each layer takes {shown_bytes(least)} on each rank, "
            f"but there are {shown_bytes(max(0, num_bytes))}; set it to at least {least}"
        )
    share = num_bytes / all_bytes
    slots = {name: max(1, int(share * size.num_experts + ROUNDING)) for name, size in sizes.items()}
    num_bytes = sum(slots[name] * size.slot_bytes for name, size in sizes.items())
    most_active = max(layer.config.router.top_k for layer in layers.values())
    return Budget(slots, num_bytes, all_bytes, least_slots=-(-2 * most_active // len(layers)))


def _put_on_disk(layers: Mapping[str, MoELayer], *, is_on_disk: bool) -> None:
    for layer in layers.values():
        layer.experts.gate_up.is_on_disk = layer.experts.down.is_on_disk = is_on_disk


def outlook(parts: Sequence[Part], num_bytes: int) -> str | None:
    """Return a text on what `expert_memory` would do; None if the model fits, or if the other weights do not fit.

    Args:
        parts: parts of the whole model, or of one rank.
        num_bytes: memory for weights.
    """
    experts = [part for part in parts if part.name == ROUTED_EXPERTS]
    all_bytes = sum(part.num_bytes for part in experts)
    room = num_bytes - (sum(part.num_bytes for part in parts) - all_bytes)
    if room <= 0 or room >= all_bytes:
        return None
    active_bytes = sum(part.num_bytes * part.num_active // part.num_parameters for part in experts)
    read_bytes = active_bytes * (all_bytes - room) // all_bytes
    return (
        f"--expert-memory auto keeps {shown_bytes(room)} of {shown_bytes(all_bytes)} of routed experts in memory, and "
        f"a token reads up to {shown_bytes(read_bytes)}: {ASSUMED_DISK_RATE / read_bytes:.2g} tokens/s from a disk "
        f"with {ASSUMED_DISK_RATE / 1e9:.0f} GB/s, more if tokens choose the same experts; "
        f"prompts read the rest once for up to {TOKENS_WITH_EXPERTS_ON_DISK} tokens"
    )
