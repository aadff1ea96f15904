"""Triton kernels in Triton's interpreter, which runs them on a CPU.

TRITON_INTERPRET=1 selects the interpreter for a whole process, before triton is imported. Without it, these tests are
not collected.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None

collect_ignore_glob = [] if IS_INTERPRETING else ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Set torch to one thread: the interpreter is Python code, which more threads only slow down."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _products_by_row() -> Iterator[None]:
    """Make rows of the interpreter's products independent of each other."""
    from moeserve.bench.gpu.rehearsal import products_by_row

    with products_by_row():
        yield


@pytest.fixture
def torch_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter's conversions to E4M3 and bfloat16 by torch's."""
    from triton.runtime import interpreter

    from moeserve.bench.gpu.rehearsal import convert_by_torch

    monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)


@pytest.fixture
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the Triton kernels for the CPU, whose tensors the interpreter accepts."""
    from moeserve.ops import select
    from moeserve.ops.backend import TRITON

    monkeypatch.setitem(select.BACKENDS, "cpu", lambda dtype: TRITON)
