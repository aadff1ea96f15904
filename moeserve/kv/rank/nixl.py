"""Reading items from another rank's KV cache with NIXL, over InfiniBand, NVLink, shared memory or TCP.

The connection between the ranks (`wire.py`) still determines the items that may be read, and for how long. But
anyone who can reach NIXL's own ports and knows the metadata that is sent to receivers can read and write this rank's
whole cache.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from moeserve.addresses import is_loopback, own_addresses
from moeserve.config.environment import set_for_libraries
from moeserve.errors import SettingsError, missing_extra
from moeserve.kv.rank.items import CachedItems
from moeserve.kv.rank.wire import NixlShare, TensorPlace
from moeserve.processes.peer_connection import PeerError

SECONDS_BETWEEN_LOOKS = 0.0002


class NixlMemory:
    """The memory of this rank's KV cache, registered so that NIXL agents of other ranks may read it."""

    def __init__(self, items: CachedItems, axes: Sequence[int], host: str) -> None:
        """
        Args:
            axes: for each tensor of the items, the axis along which it is divided over ranks; 0: it is not divided.
            host: address of this host. NIXL uses the interface with this address, unless UCX_NET_DEVICES names others.

        Raises:
            SettingsError: NIXL is not installed or does not work, or no interface has this address.
        """
        interface = "lo" if is_loopback(host) else ""
        interface = interface or next((name for name, address in own_addresses().items() if address == host), "")
        if not interface:
            raise SettingsError(
                f"kv_transfer_backend='nixl': {host} is not the first address of an interface; name the interface as "
                "kv_transfer_address"
            )
        set_for_libraries({"UCX_NET_DEVICES": ",".join([*infiniband_devices(interface), interface])})
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise SettingsError(missing_extra("kv_transfer_backend='nixl'", "nixl", error)) from None
        tensors = [each.tensor for each in items.tensors]
        try:
            sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            self._agent = nixl_agent(secrets.token_hex(16), nixl_agent_config(backends=["UCX"], sync_mode=sync))
            self._agent.register_memory([tensor for tensor in tensors if tensor.numel()])
        except Exception as error:  # NIXL raises many kinds
            raise SettingsError(f"kv_transfer_backend='nixl': NIXL does not work here: {error}") from None
        self._kind = "VRAM" if tensors[0].is_cuda else "DRAM"
        self._device = max(tensors[0].get_device(), 0)
        self._remote_agents: dict[bytes, str] = {}  # names of agents, by their metadata
        self._lock = threading.Lock()
        self.share = NixlShare(
            agent=self._agent.get_agent_metadata(),
            device=self._device,
            tensors=[place_of(tensor, axis) for tensor, axis in zip(tensors, axes, strict=True)],
        )

    def read(self, theirs: NixlShare, copies: Sequence[np.ndarray]) -> None:
        """Copy ranges of another rank's memory into this rank's memory, and return when nothing more will be written.

        There is no time limit, because a copy cannot be stopped: UCX over TCP continues to write after NIXL has
        released the transfer and removed the other agent. The copy fails when the other process exits.

        Args:
            copies: arrays [ranges, 3] uint64 of the remote address, the local address and the number of bytes.

        Raises:
            PeerError: the copy failed.
        """
        rows = np.concatenate(copies)
        columns = [np.full(len(rows), device, np.uint64) for device in (theirs.device, self._device)]
        there = np.stack([rows[:, 0], rows[:, 2], columns[0]], axis=1)
        here = np.stack([rows[:, 1], rows[:, 2], columns[1]], axis=1)
        try:
            with self._lock:
                if theirs.agent not in self._remote_agents:
                    self._remote_agents[theirs.agent] = self._agent.add_remote_agent(theirs.agent)
            agent, of = self._remote_agents[theirs.agent], self._agent.get_xfer_descs
            handle = self._agent.initialize_xfer("READ", of(here, self._kind), of(there, self._kind), agent)
            try:
                state = self._agent.transfer(handle)
                while state == "PROC":
                    time.sleep(SECONDS_BETWEEN_LOOKS)
                    state = self._agent.check_xfer_state(handle)
            finally:
                self._agent.release_xfer_handle(handle)
        except Exception as error:  # NIXL raises many kinds
            raise PeerError(f"NIXL: {error}") from None
        if state != "DONE":
            raise PeerError("NIXL: the transfer has failed")


def infiniband_devices(interface: str) -> list[str]:
    """Return the InfiniBand or RoCE devices of a network interface, as UCX names them."""
    folder = Path("/sys/class/net") / interface / "device" / "infiniband"
    return [f"{device.name}:1" for device in sorted(folder.iterdir())] if folder.is_dir() else []


def place_of(tensor: Tensor, axis: int) -> TensorPlace:
    """Return the memory layout of a tensor of items, which ranks divide along an axis; 0: it is not divided."""
    size = tensor.element_size()
    return TensorPlace(
        address=tensor.data_ptr(),
        item_bytes=tensor.stride(0) * size,
        num_rows=math.prod(tensor.shape[1:axis]),
        row_bytes=tensor.stride(axis - 1) * size if axis > 1 else 0,
        unit_bytes=tensor.stride(axis) * size,
    )


def ranges(place: TensorPlace, indices: Sequence[int], first: int, length: int) -> np.ndarray:
    """Return the start address and the number of bytes of each memory range of some items, [ranges, 2] uint64.

    Args:
        indices: indices of the items.
        first, length: range along the axis by which the tensor is divided; length 0: whole items.
    """
    starts = place.address + np.asarray(indices, np.uint64) * np.uint64(place.item_bytes)
    num_bytes = place.item_bytes
    if length:
        rows = np.arange(place.num_rows, dtype=np.uint64) * np.uint64(place.row_bytes)
        starts = (starts[:, None] + rows + np.uint64(first * place.unit_bytes)).reshape(-1)
        num_bytes = length * place.unit_bytes
    return np.stack([starts, np.full(len(starts), num_bytes, np.uint64)], axis=1)
