"""An engine logs why its results may depend on the batch."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from reference_models import Reference

from moeserve import LLM
from moeserve.ops.cpu.native import native_kernels
from moeserve.ops.select import select_kernels
from moeserve.worker import worker
from moeserve.worker.worker import why_not_batch_invariant


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"device": "cuda"}, "device='cuda'"),
        ({"dtype": "float16"}, "dtype='float16'"),
    ],
)
def test_reasons(change: dict[str, Any], reason: str | None) -> None:
    config = SimpleNamespace(**dict(device="cpu", dtype="bfloat16", tensor_parallel_size=1) | change)
    found = why_not_batch_invariant(cast(Any, config), select_kernels(torch.device("cpu")))
    if native_kernels() is None and "device" not in change:
        reason = "C++ kernels"
    assert found is None if reason is None else reason in str(found)


@pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels are not built")
def test_the_reason_is_logged(plain: Reference, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=worker.__name__):
        for dtype in ("float32", "float16"):
            LLM(model=str(plain.folder), dtype=dtype, num_threads=1).shutdown()
            assert ("dtype='float16'" in caplog.text) == (dtype == "float16")
