"""The choice of a device's kernels."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from moeserve.ops.kernels import Kernels
from moeserve.ops.native import native_kernels
from moeserve.ops.side_stream import CudaSideStream
from moeserve.ops.torch.table import TORCH_KERNELS

if TYPE_CHECKING:
    from moeserve.config.settings import AttentionChoice

logger = logging.getLogger(__name__)

BFLOAT16_CAPABILITY = (8, 0)  # the first compute capability whose tensor cores multiply bfloat16
FLOAT8_CAPABILITY = (8, 9)  # the first one whose tensor cores multiply E4M3


def _for_cpu() -> Kernels:
    native = native_kernels()
    if native is None:
        return TORCH_KERNELS
    from moeserve.ops.cpu.table import cpu_kernels

    return cpu_kernels(native)


def _for_cuda() -> Kernels:
    if not has_triton():
        return dataclasses.replace(TORCH_KERNELS, side_stream=CudaSideStream())
    from moeserve.ops.triton.table import TRITON_KERNELS

    return dataclasses.replace(
        TRITON_KERNELS, side_stream=CudaSideStream(), compiles_on_first_use=True, supports_cuda_graphs=True
    )


TABLES: dict[str, Callable[[], Kernels]] = {"cpu": _for_cpu, "cuda": _for_cuda, "meta": lambda: TORCH_KERNELS}


def select_kernels(
    device: torch.device,
    attention_library: AttentionChoice = "triton",
    block_size: int | None = None,
    *,
    batch_invariant: bool = False,
) -> Kernels:
    """Return the kernels for a device. Called once per rank.

    Args:
        attention_library: on a GPU, the library that serves grouped-query attention; "triton": our own kernels;
            "measured": the one that was measured to be the fastest.
        block_size: positions in a block of the KV cache; needed unless our own kernels are chosen.
        batch_invariant: return batch-invariant kernels, which are slower on a GPU. The config allows this only with our
            own kernels.

    Raises:
        SettingsError: the named library cannot be used here.
    """
    table = TABLES[device.type]()
    if table.name == "torch" and device.type != "meta":
        logger.info("the kernels for device %s are not built or installed: plain torch runs instead, slower", device)
    if batch_invariant and not table.batch_invariant_dtypes:
        from moeserve.ops.products.ordered import batch_invariant_kernels

        return batch_invariant_kernels(table)
    if attention_library == "triton":
        return table
    from moeserve.ops.attention.library import with_attention_library

    assert block_size is not None
    return with_attention_library(table, attention_library, device, block_size)


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
