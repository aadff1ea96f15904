"""Triton kernels in Triton's interpreter, which runs them on a CPU.

TRITON_INTERPRET=1 selects the interpreter for a whole process, before triton is imported. Without it, these tests are
not collected.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None

collect_ignore_glob = [] if IS_INTERPRETING else ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Set torch to one thread: the interpreter is Python code, which more threads only slow down."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def torch_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter's conversions to E4M3 and bfloat16 by torch's.

    The interpreter loses the carry of numbers that round up to a power of two, and converts NaN to a number.
    """
    import numpy as np
    import torch
    from triton.runtime import interpreter

    torch_types = {
        "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
        "bf16": (torch.bfloat16, torch.int16),
        "fp16": (torch.float16, torch.int16),
        "fp32": (torch.float32, torch.int32),
    }

    def convert(numbers: np.ndarray, from_type: Any, to_type: Any, rounding: Any) -> np.ndarray:
        from_dtype, from_bits = torch_types[str(from_type)]
        dtype, to_bits = torch_types[str(to_type)]
        bits = torch.from_numpy(np.ascontiguousarray(numbers).copy()).view(from_bits)
        converted = bits.view(from_dtype).to(dtype).view(to_bits).numpy()
        return converted.view(f"uint{8 * converted.itemsize}")

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the Triton kernels for the CPU, whose tensors the interpreter accepts."""
    from moeserve.ops import select
    from moeserve.ops.triton.table import TRITON_KERNELS

    monkeypatch.setitem(select.TABLES, "cpu", lambda: TRITON_KERNELS)
