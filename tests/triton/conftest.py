"""Triton kernels in Triton's interpreter, which runs them on a CPU: their numbers, not their machine code.

The interpreter is chosen by TRITON_INTERPRET=1 before triton is imported, for a whole process. So these tests have one
of their own; in another, they are left out.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None

collect_ignore_glob = [] if IS_INTERPRETING else ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The interpreter is Python: torch's threads only get in its way."""
    import torch

    torch.set_num_threads(1)
