"""Who may not rely on equal bytes is told so."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from reference_models import Reference

from moeserve import LLM
from moeserve.config.settings import EngineConfig
from moeserve.ops.native import native_kernels
from moeserve.worker import worker


def config(**changes: Any) -> EngineConfig:
    facts = dict(device="cpu", dtype="bfloat16", tensor_parallel_size=1) | changes
    return cast(EngineConfig, SimpleNamespace(**facts))


@pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels are not built")
def test_reasons() -> None:
    assert worker.why_bytes_may_move(config()) is None
    assert worker.why_bytes_may_move(config(tensor_parallel_size=2)) == "tensor_parallel_size=2"
    assert worker.why_bytes_may_move(config(device="cuda")) == "device='cuda'"
    assert "float16" in str(worker.why_bytes_may_move(config(dtype="float16")))


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "native_kernels", lambda: None)
    assert worker.why_bytes_may_move(config()) == "the C++ kernels are missing"


@pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels are not built")
def test_it_is_logged(plain: Reference, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=worker.__name__):
        for dtype in ("float32", "float16"):
            LLM(model=str(plain.folder), dtype=dtype, num_threads=1).shutdown()
            assert ("may depend on what runs beside it" in caplog.text) == (dtype == "float16")
