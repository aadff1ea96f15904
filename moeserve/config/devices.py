"""Defaults that depend on the device."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config.engine_config import DeviceName
from moeserve.config.settings import DispatcherName, QuantizationName


@dataclass(frozen=True, kw_only=True)
class DeviceDefaults:
    """The defaults of one kind of device, and the formats in which its kernels compute."""

    name: DeviceName
    max_num_seqs: int
    max_num_batched_tokens: int
    dispatcher: DispatcherName  # between several ranks
    invariant_dispatcher: DispatcherName  # the same, if results must not depend on the batch
    quantizations: tuple[QuantizationName, ...]  # formats into which weights can be quantised while they are loaded


DEVICES: dict[DeviceName, DeviceDefaults] = {
    "cpu": DeviceDefaults(
        name="cpu",
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        dispatcher="shared_memory",
        invariant_dispatcher="shared_memory",
        quantizations=("int8", "int4"),
    ),
    "cuda": DeviceDefaults(
        name="cuda",
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        dispatcher="deepep",
        invariant_dispatcher="all_to_all",
        quantizations=("fp8",),
    ),
}
