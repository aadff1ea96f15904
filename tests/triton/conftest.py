"""Triton kernels in Triton's interpreter, which runs them on a CPU: their numbers, not their machine code.

The interpreter is chosen by TRITON_INTERPRET=1 before triton is imported, for a whole process. So these tests have one
of their own; in another, they are left out.
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
    """The interpreter is Python: torch's threads only get in its way."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def conversions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own conversions to E4M3 and bfloat16 are wrong: of a number that rounds up to a power of two it
    loses the carry, and NaN is none. So torch's stand in for them.
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
    """The Triton kernels serve the CPU, whose tensors the interpreter takes."""
    from moeserve.ops import select
    from moeserve.ops.triton.table import TRITON_KERNELS

    monkeypatch.setitem(select.TABLES, "cpu", lambda: TRITON_KERNELS)
