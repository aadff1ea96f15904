"""Which RMSNorm a device gets, and that the one in plain torch is transformers'."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from moeserve.ops.norm import choose_rms_norm, torch_rms_norm

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_a_gpu_gets_the_kernel() -> None:
    from moeserve.triton_kernels.rms_norm import rms_norm

    assert choose_rms_norm("cuda") is rms_norm


def test_a_gpu_without_triton_gets_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_rms_norm("cuda") is torch_rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_torch_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

    generator = torch.Generator().manual_seed(1)
    norm = MixtralRMSNorm(300, eps=1e-5).to(dtype)
    norm.weight.data.copy_(torch.randn(300, generator=generator))
    x_TD = torch.randn(9, 300, generator=generator).to(dtype)
    assert torch.equal(torch_rms_norm(x_TD, norm.weight, 1e-5), norm(x_TD))
