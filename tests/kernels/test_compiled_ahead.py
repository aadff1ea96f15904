"""Kernels are compiled without a GPU, and launches on one find them in the cache."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter hides the compiler"),
]


def played_gpu() -> SimpleNamespace:
    """Return a driver that loads machine code and launches nothing."""
    from triton.backends.compiler import GPUTarget

    loaded: list[str] = []

    def load(name: str, binary: bytes, *arguments: object) -> tuple[int, int, int, int, int]:
        assert binary.startswith(b"\x7fELF")
        loaded.append(name)
        return 0, 0, 32, 0, 1024

    properties = {"max_shared_mem": 2**18}
    return SimpleNamespace(
        loaded=loaded,
        utils=SimpleNamespace(get_device_properties=lambda device: properties, load_binary=load),
        launcher_cls=lambda source, metadata: lambda *arguments: None,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,  # not that of the compilation, so that kernels are looked up
        get_current_stream=lambda device: 0,
    )


@pytest.mark.slow
def test_launches_on_a_gpu_find_what_was_compiled_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moved cache folder, without what launches do not need, still has the kernels for launches with tensors."""
    import torch
    from triton import knobs
    from triton.runtime.driver import driver

    from moeserve.bench.gpu.launches import items, relocate
    from moeserve.bench.gpu.parts import Job
    from moeserve.triton_kernels.rms_norm import add_rms_norm, rms_norm

    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "made"))
    (row,) = dict(items(Job("compile", 1)))["kernels of the check norms"]()
    assert row["status"] == "passed"
    assert row["num_new"] == row["num_kernels"] > 0
    (tmp_path / "made").rename(tmp_path / "carried")
    assert not list((tmp_path / "carried").glob("*/*.ptx"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "carried"))
    relocate(tmp_path / "carried")
    gpu = played_gpu()
    were_found = []
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, cache_hit, **_: were_found.append(cache_hit))
    x, weight = torch.zeros(129, 2048, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.bfloat16)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-5)
    assert gpu.loaded == ["rms_norm_kernel"] * 2
    assert were_found == [True, True]
    rms_norm(x.float(), weight.float(), 1e-5)
    assert were_found == [True, True, False], "the check has no float32 weights"


def test_kernel_that_does_not_compile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from moeserve.bench.gpu.launches import compile_rows, recorded_launches
    from moeserve.triton_kernels.rms_norm import rms_norm

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with recorded_launches() as launches:
        rms_norm(torch.zeros(3, 40), torch.zeros(40), 1e-5)
    launches[0].options["num_warps"] = 3
    (row,) = compile_rows(lambda: launches, 90)
    assert row["status"] == "failed"
    assert row["wrong"][0].startswith("rms_norm_kernel: ")
