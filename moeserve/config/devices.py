"""Defaults that depend on the device."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config.engine_config import DeviceName
from moeserve.config.settings import DispatcherName, QuantizationName


@dataclass(frozen=True, kw_only=True)
class RankSpeed:
    """The speed of one rank, as assumed for the choice of a layout."""

    memory: float  # bytes per second
    links: float  # bytes per second, received from other ranks
    products: float  # operations per second; a multiply-add counts as two


@dataclass(frozen=True, kw_only=True)
class DeviceDefaults:
    """The defaults of one kind of device, and the formats in which its kernels compute."""

    name: DeviceName
    max_num_seqs: int
    max_num_batched_tokens: int
    # on a GPU, share of all its memory, for weights and caches; on a CPU, of the memory free after loading, for caches
    memory_share: float
    dispatcher: DispatcherName  # between several ranks
    invariant_dispatcher: DispatcherName  # the same, if results must not depend on the batch
    quantizations: tuple[QuantizationName, ...]  # formats into which weights can be quantised while they are loaded
    sampling_piece: int  # scores processed together in float64; on a CPU, their copies should stay in its cache
    speed: RankSpeed


DEVICES: dict[DeviceName, DeviceDefaults] = {
    "cpu": DeviceDefaults(
        name="cpu",
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        memory_share=0.5,  # other processes need memory too
        dispatcher="shared_memory",
        invariant_dispatcher="shared_memory",
        quantizations=("int8", "int4"),
        sampling_piece=2**18,
        speed=RankSpeed(memory=8e9, links=4e9, products=70e9),  # speed of one core with AVX-512
    ),
    "cuda": DeviceDefaults(
        name="cuda",
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        memory_share=0.9,
        dispatcher="deepep",
        invariant_dispatcher="all_to_all",
        quantizations=("fp8",),
        sampling_piece=2**24,
        speed=RankSpeed(memory=2.7e12, links=300e9, products=600e12),  # what an H100 achieves of its peaks
    ),
}
