"""The Triton RMSNorm: its numbers in Triton's interpreter, and its machine code for sm_90. Neither needs a GPU.

The interpreter must be chosen before triton is imported, and would hide the compiler. So one child process runs all
cases in it, and the tests here look at what it found.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moeserve.ops.norm import choose_rms_norm, torch_rms_norm

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

CASES = [
    (dtype, shape, layout)
    for dtype in ("float32", "float16")
    for shape, layout in [
        ((1, 1), "contiguous"),
        ((5, 1024), "contiguous"),
        ((7, 333), "contiguous"),
        ((3, 1000), "contiguous"),
        ((2, 4097), "contiguous"),
        ((4, 3, 96), "contiguous"),
        ((0, 64), "contiguous"),
        ((6, 200), "row slices"),
        ((6, 200), "transposed"),
        ((3, 128), "tiny values"),
        ((2, 64), "zeros"),
    ]
]

CHILD = """
import json, sys, torch
from moeserve.ops.norm import torch_rms_norm
from moeserve.triton_kernels.rms_norm import rms_norm

generator = torch.Generator().manual_seed(0)
findings = []
for dtype_name, shape, layout in json.load(sys.stdin):
    dtype = getattr(torch, dtype_name)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)
    match layout:
        case "contiguous": x = draw(*shape)
        case "row slices": x = draw(shape[0], 2 * shape[1])[:, 8 : 8 + shape[1]]
        case "transposed": x = draw(shape[1], shape[0]).t()
        case "tiny values": x = draw(*shape) * 1e-3
        case "zeros": x = torch.zeros(shape, dtype=dtype)
    weight = draw(shape[-1])
    actual, expected = rms_norm(x, weight, 1e-5), torch_rms_norm(x, weight, 1e-5)
    error = (actual.float() - expected.float()).abs() / (1 + expected.float().abs())
    findings.append({
        "shape": list(actual.shape),
        "dtype": str(actual.dtype).removeprefix("torch."),
        "error": error.max().item() if error.numel() else 0.0,
        "share_unequal": (actual != expected).float().mean().item() if error.numel() else 0.0,
    })
print(json.dumps(findings))
"""


@pytest.fixture(scope="module")
def findings() -> dict[tuple, dict]:
    """What the kernel gave in the interpreter, case by case."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(CASES),
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return dict(zip(CASES, json.loads(child.stdout), strict=True))


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_plain_torch_in_the_interpreter(case: tuple, findings: dict[tuple, dict]) -> None:
    dtype, shape, _ = case
    found = findings[case]
    assert found["shape"] == list(shape)
    assert found["dtype"] == dtype
    # Both round at the same places, so only the order of the sum differs: rarely, a float16 lands one step away.
    assert found["error"] <= {"float32": 1e-6, "float16": 1e-3}[dtype]
    assert dtype == "float32" or found["share_unequal"] <= 0.01


@needs_triton
@pytest.mark.parametrize("width", [128, 1024, 4096, 7168, 16384])
@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
def test_compiles_for_sm_90_within_its_registers(
    pointer: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moeserve.triton_kernels.rms_norm import compile_options, rms_norm_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block_size = triton.next_power_of_2(width)
    source = ASTSource(
        fn=rms_norm_kernel,
        signature={
            "x_ptr": pointer,
            "weight_ptr": pointer,
            "output_ptr": pointer,
            "row_stride": "i32",
            "width": "i32",
            "eps": "fp32",
            "BLOCK_D": "constexpr",
        },
        constexprs={"BLOCK_D": block_size},
        # A launch finds out that torch's pointers and these widths are multiples of 16, and compiles for it.
        attrs={(argument,): [["tt.divisibility", 16]] for argument in range(5)},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=compile_options(block_size))
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    assert compiled.metadata.shared <= 1024  # bytes: partial sums of the warps, no more

    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    usage = _resource_usage(tmp_path / "kernel.cubin")
    assert usage["STACK"] == usage["LOCAL"] == 0, f"registers are spilled: {usage}"


def _resource_usage(cubin: Path) -> dict[str, int]:
    """Registers per thread and bytes of each kind of memory, as the tool that comes with triton reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    report = subprocess.run(
        [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    return {name: int(amount) for name, amount in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", report)}


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
