"""Finds the C++ kernels, where they were built. Knows none of them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch

# Of the activations that its kernels take; float16 goes to the references.
NATIVE_DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def native_kernels() -> ModuleType | None:
    """The module `moeserve._cpu`, or None where the package was installed without a compiler.

    Raises:
        ImportError: it is there but cannot be loaded, which no fallback should hide.
    """
    if importlib.util.find_spec("moeserve._cpu") is None:
        return None
    return importlib.import_module("moeserve._cpu")


def require_native() -> ModuleType:
    """The module, where `backend` says that it serves."""
    kernels = native_kernels()
    assert kernels is not None
    return kernels
