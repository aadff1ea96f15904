"""The checks of bench/gpu find right kernels right, in Triton's interpreter, and each finds each of its kernels broken.

On a GPU the same checks run with other shapes and dtypes.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable
from datetime import date
from typing import Any

import attention_stand_ins
import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

import moeserve.triton_kernels
from moeserve.bench.gpu import check_attention, kernels
from moeserve.bench.gpu.check import WRONG, Case, Check, Expected, Place, compare, compare_exactly, worst
from moeserve.bench.gpu.checks import CHECKS, covered, run_check
from moeserve.bench.gpu.costs import GpuLimits, Work
from moeserve.bench.gpu.report import row_text
from moeserve.bench.gpu.shapes import AttentionShape, LatentShape, MoEShape
from moeserve.ops.libraries.attention import open_library
from moeserve.ops.libraries.varlen import Varlen
from moeserve.triton_kernels.activation import silu_multiply

TORCH_TYPES = {
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "fp32": (torch.float32, torch.int32),
}
# Functions of the kernels' modules that launch nothing.
HELPERS = {
    *("tile_config", "split_config", "choose_splits", "choose_config", "block_sizes", "compile_options"),
    *(
        "sum_options",
        "launch_sizes",
        "write_blocks",
        "kernel_sizes",
        "merge_warps",
        "num_columns",
        "kind_of",
        "max_tiles",
    ),
    *("kernel_constants", "launch_attention", "launch_write"),
}
FAULT = 1 + 1 / 32  # far less than a wrong row or scale makes
# At small shapes one check of 8-bit products is like another.
DIFFERENT = [check for check in CHECKS if "fp8" not in check.name or check.name.endswith("Mixtral-8x7B")]
EVERY = [(check, kernel) for check in DIFFERENT for kernel in check.kernels]


@pytest.fixture(autouse=True)
def _conversions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own conversions to 8 and 16 bits lose carries."""

    def convert(numbers: np.ndarray, from_type: Any, to_type: Any, rounding: Any) -> np.ndarray:
        from_dtype, from_bits = TORCH_TYPES[str(from_type)]
        dtype, to_bits = TORCH_TYPES[str(to_type)]
        bits = torch.from_numpy(np.ascontiguousarray(numbers).copy()).view(from_bits)
        converted = bits.view(from_dtype).to(dtype).view(to_bits).numpy()
        return converted.view(f"uint{8 * converted.itemsize}")

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def place(seed: int, *dtypes: torch.dtype) -> Place:
    device = torch.device("cpu")
    return Place(device, torch.Generator(device).manual_seed(seed), dtypes or (torch.float32,), is_small=True)


@pytest.mark.parametrize("check", [check for check in DIFFERENT if check.kernels], ids=lambda check: check.name)
def test_kernels_are_right(check: Check) -> None:
    """With new numbers each day."""
    seed = date.today().toordinal()
    for case in check.run(place(seed, torch.float32, torch.float16)):
        assert case.error_ratio <= 1, (seed, case)


def test_every_kernel_is_checked() -> None:
    found: set[str] = set()
    for module in pkgutil.iter_modules(moeserve.triton_kernels.__path__):
        if module.name in ("tune", "tuning"):
            continue
        imported = importlib.import_module(f"moeserve.triton_kernels.{module.name}")
        found |= {
            name
            for name, function in inspect.getmembers(imported, inspect.isfunction)
            if function.__module__ == imported.__name__ and not name.startswith("_")
        }
    assert covered() == found - HELPERS


def broken(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with everything that it gives a little off; or what it writes, if it gives nothing."""

    def call(*args: Any, **options: Any) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor)]
        before = [tensor.clone() for tensor in tensors]
        result = kernel(*args, **options)
        if result is not None:
            return tuple(map(spoiled, result)) if isinstance(result, tuple) else spoiled(result)
        for tensor, old in zip(tensors, before, strict=True):
            if compare_exactly(tensor, old):
                tensor.copy_(spoiled(tensor))
        return None

    return call


def spoiled(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return ~tensor
    if tensor.dtype == torch.float8_e4m3fn:
        return (tensor.view(torch.uint8) ^ 4).view(tensor.dtype)
    if not tensor.is_floating_point():
        return tensor.flip(0) if len(tensor) > 1 else tensor + 1
    return tensor * FAULT


@pytest.mark.parametrize(("check", "kernel"), EVERY, ids=[f"{check.name}-{kernel}" for check, kernel in EVERY])
def test_a_kernel_that_is_a_little_off_is_found(check: Check, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[check.run.__module__]
    monkeypatch.setattr(module, kernel, broken(getattr(module, kernel)))
    wrong = next((case.name for case in check.run(place(0)) if not case.error_ratio <= 1), None)
    assert wrong is not None
    assert wrong.startswith(kernel), "only this kernel is broken"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for other libraries, as if they were installed."""
    attention_stand_ins.install(monkeypatch, attention_stand_ins.strict())
    found = [open_library("flashinfer", torch.device("cpu"))]
    for name in ("FA2", "FA3"):
        found.append(Varlen(attention_stand_ins.Varlen(name).varlen_attn_out, name))  # type: ignore[arg-type]
    for module in (check_attention, kernels):
        monkeypatch.setattr(module, "installed_peers", lambda device: tuple(found))


def test_other_libraries_are_checked_where_they_are_installed(peers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check = next(check for check in CHECKS if check.name == "attention of other libraries")
    cases = list(check.run(place(0, torch.float16)))
    assert max(case.error_ratio for case in cases) <= 1
    version = torch.__version__
    assert [case.name.replace(version, "2") for case in cases] == [
        *(f"flashinfer 1.2.3 float16 window, {steps}, {size}" for size in (16, 64) for steps in ("decode", "prefill")),
        "flashinfer 1.2.3 float16 window, prefill, 256",
        *(f"varlen 2 FA2 float16 window, {steps}, 256" for steps in ("decode", "prefill")),
        *(f"varlen 2 FA3 float16 window, {steps}, {size}" for size in (16, 64, 256) for steps in ("decode", "prefill")),
    ]
    attend = attention_stand_ins.attend
    monkeypatch.setattr(attention_stand_ins, "attend", lambda *args, **options: attend(*args, **options) * FAULT)
    assert all(case.error_ratio > 1 for case in check.run(place(0, torch.float16)))


def test_where_no_other_library_is_installed_that_is_told() -> None:
    check = next(check for check in CHECKS if check.name == "attention of other libraries")
    row = run_check(check, place(0), lambda: 1.0)
    assert row["status"] == "told"
    assert "none of what it checks is installed" in row_text(row)


def test_other_libraries_are_timed_on_the_same_caches(peers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    drawn = kernels._random
    monkeypatch.setattr(kernels, "_random", lambda *shape: drawn(*shape).half())  # bf16 is wrong in the interpreter
    for chunks in ([(1, 20), (1, 20)], [(4, 20), (4, 20)]):
        calls = kernels.attention_calls(AttentionShape(4, 2, 64, window=7), chunks)
        assert [label.split()[0] for label in calls] == ["triton", "flashinfer", "varlen"]
        own, *others = (call() for call in calls.values())
        for other in others:
            torch.testing.assert_close(other, own, atol=4e-3, rtol=4e-3)
    sinks = kernels.attention_calls(AttentionShape(4, 2, 64, has_sinks=True), [(4, 20)])
    assert list(sinks) == ["triton"], "no other takes sinks in chunks"


def test_a_check_says_which_cases_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    check = next(check for check in CHECKS if check.name == "activations")
    module = sys.modules[check.run.__module__]
    assert run_check(check, place(0), lambda: 1.0)["status"] == "passed"
    monkeypatch.setattr(module, "silu_multiply", broken(silu_multiply))
    row = run_check(check, place(0), lambda: 1.0)
    assert row["status"] == "failed"
    assert row["wrong"] == ["silu_multiply float32 3 x 20", "silu_multiply float32 1 x 1100"]
    assert row["worst"] in row["wrong"]
    assert row["error_ratio"] > 1
    assert row["num_cases"] == 4


def test_a_kernel_that_cannot_run_fails_its_check_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    check = next(check for check in CHECKS if check.name == "greedy choice")

    def refuse(rows_RV: Tensor) -> None:
        raise RuntimeError("out of resources: shared memory")

    monkeypatch.setattr(sys.modules[check.run.__module__], "greedy_rows", refuse)
    row = run_check(check, place(0), lambda: 1.0)
    assert row["status"] == "failed"
    assert row["error"] == "RuntimeError: out of resources: shared memory"
    assert row["num_cases"] == 2  # those before it


def test_a_check_ends_where_its_time_does() -> None:
    row = run_check(CHECKS[-1], place(0), lambda: 0.0)
    assert row["num_cases"] == 1
    assert row["status"] == "passed"
    assert "no time was left" in row["left_out"]


def test_what_is_no_number_is_never_right() -> None:
    exact = torch.ones(3, dtype=torch.float64)
    expected = Expected(exact, exact)
    assert compare(torch.tensor([1.0, 1.0, 1.0]), expected) == 0
    for bad in (math.nan, math.inf, -math.inf):
        assert not compare(torch.tensor([1.0, bad, 1.0]), expected) <= 1
    assert compare(torch.ones(2), expected) == WRONG
    rounded = expected.rounded_to(torch.bfloat16)
    assert torch.equal(rounded.value, exact)
    assert (rounded.slack > exact + 2**-8).all()


def test_errors_within_every_slack_but_large_on_the_whole_are_wrong() -> None:
    exact = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loose = Expected(exact, torch.ones_like(exact), rms=0.01)
    assert compare(exact * 1.005, loose) <= 1
    assert compare(exact * 1.03, loose) > 1


def test_the_worst_case_is_told() -> None:
    assert worst([Case("a", 0.1), Case("b", 0.9), Case("c", 0.2)]).name == "b"
    assert worst([Case("a", 3.0), Case("b", math.nan)]).error_ratio == WRONG


class Counted:
    """Times nothing: calls once."""

    def __init__(self) -> None:
        self.num_calls = 0

    def seconds(self, call: Callable[[], object]) -> float:
        self.num_calls += 1
        call()
        return 1e-3

    seconds_without_graph = seconds


def test_everything_that_is_timed_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """At small shapes, ours and the others: none refuses its arguments."""
    for name, value in {
        "DEVICE": "cpu",
        "NUM_TOKENS": (1,),
        "DECODE_BATCHES": ((2, 20),),
        "PREFILL_ROWS": 20,
        "LATENT_ROWS": 3,
        "ROW_COUNTS": (2,),
        "MOE_SHAPES": {"a": MoEShape(3, 32, 16, 2), "b": MoEShape(3, 160, 48, 2, "clamped_swiglu", has_bias=True)},
        "ATTENTION_SHAPES": {
            "Mixtral-8x7B": AttentionShape(4, 2, 16),
            "c": AttentionShape(4, 2, 16, window=7, has_sinks=True),
        },
        "LATENT_SHAPES": {"d": LatentShape(3, 16, 8)},
        "VOCAB_SIZES": {"e": 40},
    }.items():
        monkeypatch.setattr(kernels, name, value)
    timer: Any = Counted()
    limits = GpuLimits(1e12, 1e14, None)
    rows = [kernels.measure(item, timer, limits) for item in kernels.items()]
    assert timer.num_calls == len(rows) + sum(len(row["peers"]) for row in rows)
    assert not [(row["name"], peer) for row in rows for peer in row["peers"].values() if "error" in peer]
    for row in rows:
        assert row["status"] == "told"
        assert row["bytes"] > 0
        assert row_text(row).startswith(f"  told      {row['name']}: 1,000.0 us, ")
    by_name = {row["name"]: row for row in rows}
    assert by_name["products bf16 a, 1 tokens"]["notes"] == ["2 of 3 experts have rows"]
    assert by_name["experts bf16 a, 1 tokens"]["bar"]["is_met"] is False
    assert set(by_name["experts bf16 a, 1 tokens"]["peers"]) == {"transformers"}


def test_a_peer_that_cannot_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("no kernel for this shape")

    timed = kernels.Timed(lambda: None, Work(1.0), peers={"peer": refuse})
    row = kernels.measure(kernels.Item("x", lambda: timed), Counted(), GpuLimits(1.0, 1.0, None))  # type: ignore[arg-type]
    assert row["peers"] == {"peer": {"error": "RuntimeError: no kernel for this shape"}}


def test_experts_that_are_timed_are_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put beside each other computes the same."""
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    torch.manual_seed(0)
    shape = MoEShape(5, 32, 16, 2)
    layer = kernels.ExpertWeights(shape)
    for name in ("gate_up_EOI", "down_EOI"):  # the interpreter's products in bf16 are wrong
        setattr(layer, name, (getattr(layer, name) * 10).float())
    monkeypatch.setattr(kernels, "_random", lambda *shape, scale=1.0: torch.randn(shape))
    products = kernels._products(lambda: layer, 6)
    assert products.peers is not None
    torch.testing.assert_close(products.call(), products.peers["torch grouped_mm"](), atol=1e-5, rtol=1e-4)
    experts = kernels._experts(lambda: layer, 6)
    assert experts.eager_peers is not None
    own, peer = experts.call(), experts.eager_peers["transformers"]()
    torch.testing.assert_close(own.float(), peer.float(), atol=2e-2, rtol=2e-2)  # type: ignore[attr-defined]
