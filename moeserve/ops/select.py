"""The backend of a device."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from moeserve.ops.attention.flashinfer import with_flashinfer
from moeserve.ops.backend import REFERENCE, TRITON, Backend, in_order
from moeserve.ops.native import NATIVE_DTYPES, measure_memory_only, native_kernels
from moeserve.ops.products.cpu import CpuPacking
from moeserve.ops.side_stream import CudaSideStream

if TYPE_CHECKING:
    from moeserve.config.settings import AttentionChoice

logger = logging.getLogger(__name__)

BFLOAT16_CAPABILITY = (8, 0)  # the first compute capability whose tensor cores multiply bfloat16
FLOAT8_CAPABILITY = (8, 9)  # the first compute capability whose tensor cores multiply E4M3


def _for_cpu(dtype: torch.dtype) -> Backend:
    native = native_kernels()
    if native is None or dtype not in NATIVE_DTYPES:
        return REFERENCE
    return Backend(
        names=("cpu", "reference"),
        native=native,
        make_step_graph=native.CpuGraph,
        packing=CpuPacking(native),
        allocate_weights=CpuPacking(native).allocate_sharing_pages,
        measure_memory_only=measure_memory_only,
        is_batch_invariant=True,
        instruction_set=native.isa(),
    )


def _for_cuda(dtype: torch.dtype) -> Backend:
    if not has_triton():
        return dataclasses.replace(REFERENCE, side_stream=CudaSideStream())
    return dataclasses.replace(
        TRITON, side_stream=CudaSideStream(), compiles_on_first_use=True, supports_cuda_graphs=True
    )


BACKENDS: dict[str, Callable[[torch.dtype], Backend]] = {
    "cpu": _for_cpu,
    "cuda": _for_cuda,
    "meta": lambda dtype: REFERENCE,
}


def select_backend(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    attention: AttentionChoice = "triton",
    block_size: int | None = None,
    *,
    batch_invariant: bool = False,
) -> Backend:
    """Return the backend for a device. Called once per rank.

    Args:
        dtype: dtype of activations. On a CPU, plain torch runs for dtypes that are not in `NATIVE_DTYPES`.
        attention: on a GPU, the implementation of attention; "triton": our own kernels; "measured": the implementation
            that was measured to be the fastest.
        block_size: positions in a block of the KV cache; needed unless our own kernels are chosen.
        batch_invariant: return a batch-invariant backend, which is slower on a GPU. The config allows this only with
            our own kernels.

    Raises:
        SettingsError: the named library cannot be used here.
    """
    backend = BACKENDS[device.type](dtype)
    if backend.names == REFERENCE.names and device.type != "meta":
        logger.info("no kernels for device %s and %s are installed: plain torch runs, slower", device, dtype)
    if batch_invariant and not backend.is_batch_invariant:
        return in_order(backend)
    if attention == "triton":
        return backend
    assert block_size is not None
    return with_flashinfer(backend, attention, device, block_size)


def supports_bfloat16_products() -> bool:
    """True if this host's GPU multiplies bfloat16."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= BFLOAT16_CAPABILITY


def supports_float8_products() -> bool:
    """True if this host's GPU multiplies 8-bit floats, and the kernels for it are installed."""
    is_able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY
    return is_able and has_triton()


def has_triton() -> bool:
    """True if the Triton kernels can be imported."""
    return importlib.util.find_spec("triton") is not None
