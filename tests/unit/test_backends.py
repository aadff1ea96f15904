"""The backend of a device, the implementations of each operation, and that plain torch is the reference."""

from __future__ import annotations

import importlib.util
import logging
import pkgutil

import pytest
import torch

from moeserve import ops
from moeserve.ops import products, select
from moeserve.ops import rows as rows_ops
from moeserve.ops import sampling as sampling_ops
from moeserve.ops.backend import REFERENCE, TRITON, Backend, Implementation, choose
from moeserve.ops.native import native_kernels
from moeserve.ops.select import select_backend

CPU, META = torch.device("cpu"), torch.device("meta")


def test_without_kernels_plain_torch_serves_and_the_log_mentions_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select, "native_kernels", lambda: None)
    with caplog.at_level(logging.INFO, logger=select.__name__):
        assert select_backend(CPU) is REFERENCE
    assert "device cpu" in caplog.text


def test_the_meta_device_uses_plain_torch_silently(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=select.__name__):
        assert select_backend(META) is REFERENCE
    assert not caplog.text


@pytest.mark.parametrize(
    ("capability", "bfloat16", "float8"),
    [((7, 5), False, False), ((8, 0), True, False), ((8, 6), True, False), ((8, 9), True, True), ((9, 0), True, True)],
)
def test_number_formats_of_a_gpu(
    capability: tuple[int, int], bfloat16: bool, float8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert select.supports_bfloat16_products() == bfloat16
    assert select.supports_float8_products() == float8


def test_a_gpu_without_triton_uses_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    backend = select_backend(torch.device("cuda"))
    assert rows_ops.make(backend).rms_norm is rows_ops.make(REFERENCE).rms_norm
    assert not backend.supports_cuda_graphs


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_gpu_uses_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from moeserve.triton_kernels.rms_norm import rms_norm

    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    backend = select_backend(torch.device("cuda"))
    assert rows_ops.make(backend).rms_norm is rms_norm
    assert backend.supports_cuda_graphs
    assert backend.compiles_on_first_use


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_norm_of_plain_torch_equals_that_of_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

    generator = torch.Generator().manual_seed(1)
    norm = MixtralRMSNorm(300, eps=1e-5).to(dtype)
    norm.weight.data.copy_(torch.randn(300, generator=generator))
    x_TD = torch.randn(9, 300, generator=generator).to(dtype)
    assert torch.equal(rows_ops.make(REFERENCE).rms_norm(x_TD, norm.weight, 1e-5), norm(x_TD))


# Implementations that do not exist, by operation, with the reason; of a group, its operations that are the reference's.
MISSING = {
    ("block_sparse", "triton"): "models with block-sparse attention run on CPUs",
    ("routing.COPIES", "triton"): "torch chooses copies of experts",
    ("rows.add", "triton"): "torch adds",
    ("rows.add_scaled", "triton"): "torch adds",
    ("rows.gate_rows", "triton"): "torch multiplies",
    ("rows.layer_norm", "triton"): "models with LayerNorm run on CPUs",
    ("rows.layer_norm_in_place", "triton"): "the norm of an indexer's keys is torch's",
    ("rows.quantize", "cpu"): "weights in 8-bit blocks are multiplied on GPUs",
    ("rows.quantize_rms_norm", "cpu"): "weights in 8-bit blocks are multiplied on GPUs",
    ("mixing", "triton"): "Zaya runs on CPUs",
    ("lightning_attention", "triton"): "models with lightning attention run on CPUs",
    ("selective_scan", "triton"): "models with Mamba-1 run on CPUs",
}


@pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels are not built")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_operation_has_each_implementation_or_none_is_expected() -> None:
    missing = set()
    for folder in (each.name for each in pkgutil.iter_modules(ops.__path__) if each.ispkg):
        module = importlib.import_module(f"moeserve.ops.{folder}")
        tables = {name: each for name, each in vars(module).items() if name.isupper() and isinstance(each, dict)}
        kinds = {name: each for name, each in vars(module).items() if isinstance(each, products.Kind)}
        tables |= {name: each.table | {"cpu": each.of_packed} for name, each in kinds.items()}
        assert tables
        for name, table in tables.items():
            operation = folder if name == "TABLE" else f"{folder}.{name}"
            assert "reference" in table
            missing |= {(operation, kind) for kind in ("cpu", "triton") if kind not in table}
    for folder, make in {"rows": rows_ops.make, "sampling": sampling_ops.make}.items():
        for kind, backend in {"cpu": select_backend(CPU), "triton": TRITON}.items():
            fields = zip(make(backend)._fields, make(backend), make(REFERENCE), strict=True)
            missing |= {(f"{folder}.{name}", kind) for name, own, reference in fields if own is reference}
    assert missing == set(MISSING)


def test_an_implementation_that_cannot_serve_is_replaced_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    serving = Implementation[int, str](lambda backend, shape: f"{shape} by the reference")
    odd = Implementation[int, str](
        lambda backend, shape: "fast", lambda shape: f"{shape} is odd" if shape % 2 else None
    )
    table = {"fast": odd, "reference": serving}
    backend = Backend(names=("absent", "fast", "reference"))
    with caplog.at_level(logging.INFO):
        assert [choose(table, backend, shape) for shape in (2, 3, 3)] == ["fast", *["3 by the reference"] * 2]
    assert caplog.text.count("3 is odd") == 1
