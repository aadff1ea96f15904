"""The extension module with the C++ kernels, if it was built, and settings of its threads."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import threading
from collections.abc import Iterator
from types import ModuleType

import torch

from moeserve.config.facts import INSTALL_COMPILER
from moeserve.errors import SettingsError

NATIVE_DTYPES = (torch.float32, torch.bfloat16)  # dtypes of activations in C++; float16 runs in plain torch

_thread = threading.local()


def missing_kernels() -> str:
    """Return the reason why there are no C++ kernels, and what to do, as the end of a sentence about the kernels."""
    if importlib.util.find_spec("moeserve._cpu") is None:
        return f"were not built when moeserve was installed; {INSTALL_COMPILER}"
    return "support no instruction set of this processor"


@functools.cache
def native_kernels() -> ModuleType | None:
    """Return the module `moeserve._cpu`. Return None if it was not built or has no kernels for this processor.

    Raises:
        ImportError: the module exists but cannot be loaded. There is no fallback, so that the error is noticed.
        SettingsError: MOESERVE_ISA names no instruction set of this processor.
    """
    if importlib.util.find_spec("moeserve._cpu") is None:
        return None
    kernels = importlib.import_module("moeserve._cpu")
    try:
        return kernels if kernels.usable_isas() else None
    except ValueError as error:
        raise SettingsError(str(error)) from None


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads, including the caller, of the C++ kernels and of this thread's operations of torch.

    Raises:
        ValueError: the number is less than 1.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}, but it must be at least 1")
    torch.set_num_threads(num_threads)
    if kernels := native_kernels():
        kernels.set_num_threads(num_threads)


@contextlib.contextmanager
def measure_memory_only() -> Iterator[None]:
    """Let products and attention of this thread, which take most of a large step's time, return zeros at once."""
    _thread.is_measured = True
    try:
        yield
    finally:
        _thread.is_measured = False


def is_measured() -> bool:
    return getattr(_thread, "is_measured", False)
